"""Codecs that claim to be unbiased: what they decode has the mean, the variance and the independence of random rounding."""

import math
from itertools import product

import pytest
import torch

from compression.worlds import gaussian, means, vectors
from paceline.compression.codec import NoCodec, key_of
from paceline.compression.dq import DQ
from paceline.compression.qsgd import QSGD, error_size
from paceline.compression.ternary import Ternary

BUCKETS = (8, 512, None)
CODECS = [
    *(QSGD(bits=bits, norm=norm, bucket=bucket) for bits, norm, bucket in product((2, 5, 8), ("linf", "l2"), BUCKETS)),
    *(QSGD(bits=bits, norm=("linf", "l2")[bits % 2]) for bits in (3, 4, 6, 7)),
    DQ(target_bits=2, norm="linf", bucket=8), DQ(target_bits=5, norm="l2", bucket=None), DQ(target_bits=5),
    *(Ternary(bucket=bucket) for bucket in BUCKETS), NoCodec(),
]  # fmt: skip
DRAWS = {1: 20, 7: 20, 512: 12, 513: 12, 1300: 16}  # of one element, of an odd number, at the edges of buckets
SIGMAS = 5
SELDOM = 10  # draws more or less than expected, of what is so seldom that its chance is not normal


def decoded(codec, x, key):
    return codec.decode(codec.encode(x, None, key), len(x), x.dtype)


def units(codec, x):
    """By how much two neighbouring levels of each element of x (n,) differ, as the papers have it, in float64."""
    bits = getattr(codec, "bits", None) or round(getattr(codec, "target_bits", 2))
    norm = {"linf": math.inf, "l2": 2.0}[getattr(codec, "norm", "linf")]
    largest = torch.finfo(torch.float32).max
    parts = x.split(codec.bucket or len(x))
    scales = [part.norm(norm).clamp(max=largest).float().double().expand(len(part)) for part in parts]
    return torch.cat(scales) / (2 ** (bits - 1) - 1)


def check_random_rounding(draws, x, unit):
    """Draws (draws, n) of x (n,), each the multiple of its unit (n,) below or above: their mean and their variance.

    All are counted in units. Numbers of float32 are rounded, the smallest of them by much of a unit: that is what is allowed
    beside chance.
    """
    is_some = unit > 0
    assert not draws[:, ~is_some].any()
    if not is_some.any():
        return
    x, draws, unit = x[is_some], draws[:, is_some], unit[is_some]
    z, found = x / unit, draws / unit
    rounding = 2.0**-150 / unit + 2.0**-22 * z.abs() + 2.0**-24
    below = z.floor()
    assert bool(((found - below).clamp_max(1).clamp_min(0) - (found - below)).abs().le(2 * rounding + 1e-9).all())
    level = (found - below).round()
    assert bool(((found - below - level).abs() <= 2 * rounding).all()), "levels alone, the one below or the one above"
    chance = z - below
    error, variance = (found - z).mean(0), chance * (1 - chance) / len(found)
    allowed = 2 * rounding + SIGMAS * variance.sqrt() + SELDOM / len(found)
    assert bool((error.abs() <= allowed).all()), "each element"
    for weight in (torch.ones_like(z), z.sign(), (variance + 1e-3).rsqrt()):
        bound = SIGMAS * (weight.square() * variance).sum().sqrt() + SELDOM * weight.abs().max() / len(found)
        assert (weight * error).sum().abs() <= bound + (weight.abs() * 2 * rounding).sum(), "all elements together"
    squares = (found - z).square()
    fourth = chance * (1 - chance) * ((1 - chance) ** 3 + chance**3)
    spread = (len(found) * (fourth - (chance * (1 - chance)).square())).sum().clamp_min(0).sqrt()
    expected = len(found) * (chance * (1 - chance)).sum()
    assert (squares.sum() - expected).abs() <= SIGMAS * spread + SELDOM + len(found) * (6 * rounding).sum(), "variance"


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_decoded_vectors_are_randomly_rounded_ones(codec):
    for size, num_draws in DRAWS.items():
        for what, x in vectors(size).items():
            draws = torch.stack([decoded(codec, x, key_of(7, step, size)) for step in range(num_draws)])
            assert bool(draws.isfinite().all()), (what, size)
            if isinstance(codec, NoCodec):
                assert torch.equal(draws, x.expand_as(draws))
                continue
            try:
                check_random_rounding(draws.double(), x.double(), units(codec, x.double()))
            except AssertionError as error:
                raise AssertionError(f"{what}, {size} elements: {error}") from None


@pytest.mark.parametrize("codec", [QSGD(bits=8), QSGD(bits=2, bucket=None), Ternary(), DQ()], ids=str)
@pytest.mark.parametrize("share", [2.0**-20, 2.0**-17, 2.0**-13])
def test_small_shares_of_a_level_are_not_lost(codec, share):
    """Elements next to a much larger one: of so many, a known number are rounded away from zero."""
    n, draws = 1 << 20, 32
    x = torch.full((n,), -share)
    x[::512] = getattr(as_qsgd(codec), "levels", 1)
    got = sum(decoded(codec, x, key_of(3, step)).double().sum() for step in range(draws)).item()
    got -= draws * x[::512].double().sum().item()
    expected = -share * draws * (n - n // 512)
    assert abs(got - expected) <= SIGMAS * math.sqrt(-expected)


def as_qsgd(codec):
    return codec.at(round(codec._target_bits)).plain if isinstance(codec, DQ) else codec


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("exponent", [-148, -126, -60, 0, 60, 127])
def test_zeros_and_the_largest_stay_where_they_are(bits, exponent):
    codec, x = QSGD(bits=bits, bucket=64), torch.zeros(256)
    x[5::64] = torch.tensor([1.0, -1.0, 1.75, -(2 - 2.0**-23)]) * 2.0**exponent
    for key in range(50):
        got = decoded(codec, x, key_of(key))
        assert not got[x == 0].any()
        assert torch.allclose(got, x, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("codec", [QSGD(bits=2, norm="l2"), QSGD(bits=8, norm="l2"), QSGD(), Ternary(), DQ()], ids=str)
def test_no_level_is_beyond_the_type(codec, dtype):
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    x = torch.full((700,), largest, dtype=dtype)
    x[1::2] *= -1
    for key in range(20):
        got = decoded(codec, x, key_of(key))
        assert got.dtype == dtype
        assert torch.allclose(got.double(), x.double(), rtol=2.0**-22)


@pytest.mark.parametrize(("norm", "bucket"), list(product(("linf", "l2"), (64, None))))
def test_scales_and_sizes_have_the_same_bits_on_every_processor(norm, bucket):
    """Added up in the order of elements, each product rounded by itself: workers choose the bits of `dq` by them."""
    x, size = gaussian(3, 1000), 0.0
    for part in x.split(bucket or 1000):
        square = 0.0
        for value in part.tolist():
            square += value * value
        scale = torch.tensor(math.sqrt(square)).item() if norm == "l2" else part.abs().max().item()
        size += len(part) * (scale * scale)
    assert error_size(x, norm, bucket) == size


def test_float64_beyond_float32_is_refused_and_below_it_is_zero():
    with pytest.raises(ValueError, match="not finite"):
        QSGD().encode(torch.full((10,), 1e39, dtype=torch.float64), None)
    assert not decoded(QSGD(), torch.full((10,), 1e-50, dtype=torch.float64), 1).any()


RANDOM = [QSGD(), QSGD(bits=7, norm="l2"), Ternary(), DQ()]


@pytest.mark.parametrize("codec", RANDOM, ids=str)
def test_errors_of_workers_steps_and_neighbours_have_nothing_in_common(codec):
    n = 1 << 16
    x = torch.full((n,), 0.37)  # errors are the random numbers, but for their scale
    x[::512] = 1.0

    def error(*key):
        found = decoded(codec, x, key_of(*key)).double() - x.double()
        return found[torch.arange(n) % 512 != 0]

    def correlation(a, b):
        return abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item())

    one, m, none = error(1, 0), len(error(1, 0)), SIGMAS / math.sqrt(n - n // 512)
    assert correlation(one, error(1, 0)) > 0.999, "the same key"
    for other in ((1, 1), (2, 0), (0, 1), (1, 0, 0), (1 + 2**32, 0)):
        assert correlation(one, error(*other)) < none, other
    for away in (*range(1, 65), 511, 512, 1024):
        assert correlation(one[: m - away], one[away:]) < none, away


def test_a_mean_takes_another_key_for_each_worker_piece_and_step():
    keys = []

    class Recording(QSGD):
        def encode(self, gradient, memory, key=0):
            if len(gradient):
                keys.append(key)
            return super().encode(gradient, memory, key)

    num_workers, steps = 3, 4
    means(Recording(), [gaussian(5, 700)] * num_workers, steps=steps)
    assert len(set(keys)) == len(keys) == steps * num_workers * (num_workers + 1)
