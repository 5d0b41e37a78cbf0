"""What codecs promise: the mean of what is decoded, its variance, what is kept, and how many bytes it takes."""

import math

import pytest
import torch

from compression.worlds import ROUNDED, UNBIASED, WITH_MEMORY, gaussian
from paceline.compression.codec import NotFiniteError, key_of
from paceline.compression.dq import DQ
from paceline.compression.qsgd import QSGD
from paceline.compression.registry import codec_registry
from paceline.compression.sign import Sign
from paceline.compression.ternary import Ternary
from paceline.compression.top_k import TopK

ALL = [*UNBIASED, *WITH_MEMORY, *ROUNDED, Ternary(clip=2.5)]
DRAWS = 400


def decoded(codec, x, memory=None, key=0):
    return codec.decode(codec.encode(x, memory, key), len(x), x.dtype)


def as_qsgd(codec):
    return codec.at(round(codec._target_bits)).plain if isinstance(codec, DQ) else codec


def within_chance(draws, x):
    """Whether means of draws (draws, n), each the level below or above x (n,), lie within five sigma of it, as they would.

    Sigma follows from the two levels. An element near one is rounded to the other so seldom that chance is not normal there:
    ten draws more or less than expected are as far as it goes, of any mean below five sigma's square.
    """
    below, above = draws.min(0).values, draws.max(0).values
    variance = ((above - x) * (x - below)).clamp_min(0)
    seldom = 10 * (above - below).max() / len(draws)
    return (draws.mean(0) - x).abs() <= 5 * (variance / len(draws)).sqrt() + seldom


@pytest.mark.parametrize("codec", UNBIASED, ids=str)
def test_unbiased_to_five_sigma(codec):
    x = gaussian(1, 1500)
    draws = torch.stack([decoded(codec, x, key=key_of(7, step)) for step in range(DRAWS)]).double()
    assert bool(within_chance(draws, x.double()).all())
    signed = (draws.mean(0) - x.double()).sum() / (draws.var(0).sum() / DRAWS).sqrt()
    assert abs(signed.item()) < 5, "all elements together"


def test_rounding_down_is_not_unbiased():
    """The control: the same check finds a rounding that is not stochastic, and one that is a tenth of a level off."""
    x = gaussian(1, 1500)
    scale = x.abs().max() / 7
    draws = ((x / scale).floor() * scale).expand(DRAWS, -1).double()
    assert not bool(within_chance(draws, x.double()).all())
    draws = torch.stack([decoded(QSGD(bits=4, bucket=None), x, key=key_of(7, step)) for step in range(DRAWS)]).double()
    off = (draws.mean(0) + 0.1 * scale - x.double()).sum() / (draws.var(0).sum() / DRAWS).sqrt()
    assert abs(off.item()) > 5


@pytest.mark.parametrize("codec", [one for one in UNBIASED if isinstance(one, (QSGD, DQ))], ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_variance_is_within_its_bound(codec, seed):
    x = gaussian(seed, 2000)
    errors = torch.tensor(
        [(decoded(codec, x, key=key_of(seed, step)) - x).double().square().sum() for step in range(60)]
    )
    bound = as_qsgd(codec).error_bound(x)
    assert errors.mean() <= bound * 1.01
    assert errors.mean() >= bound / 8  # it is a bound of this, and not of anything


def test_ternary_variance_is_scale_times_magnitudes():
    x = gaussian(3, 512)
    errors = [(decoded(Ternary(), x, key=key_of(3, k)) - x).double().square().sum() for k in range(300)]
    expected = (x.abs().max() * x.abs() - x.square()).double().sum()
    assert torch.stack(errors).mean() == pytest.approx(expected.item(), rel=0.03)


def test_clipped_ternary_is_unbiased_of_the_clipped():
    x, codec = 0.5 + gaussian(4, 4096), Ternary(clip=2.5)
    limit = 2.5 * x.double().square().mean().sqrt().item()
    assert torch.allclose(codec.clipped(x), x.clamp(-limit, limit), rtol=1e-6)
    assert (x.abs() > limit).any()
    mean = torch.stack([decoded(codec, x, key=key_of(1, step)) for step in range(DRAWS)]).double().mean(0)
    sigma = limit / 2 / math.sqrt(DRAWS)
    assert (mean - codec.clipped(x)).abs().max() < 5 * sigma


@pytest.mark.parametrize("x", [5 + 0.01 * gaussian(1, 1500), torch.full((1500,), -3.0), torch.ones(1)], ids=len)
def test_a_clip_cuts_by_magnitude_and_not_by_what_elements_differ_in(x):
    assert torch.equal(Ternary(clip=2.5).clipped(x), x)


@pytest.mark.parametrize(
    ("codec", "share"), [(TopK(fraction=0.1), 0.439), (TopK(fraction=0.01), 0.0845), (TopK(fraction=0.001), 0.0127),
                         (Sign(bucket=None), 2 / math.pi), (Sign(), 2 / math.pi)], ids=str)  # fmt: skip
def test_what_one_message_has_of_a_gaussian_vector(codec, share):
    x = gaussian(5, 1 << 19)
    lost = (decoded(codec, x, codec.start(len(x), x.dtype)) - x).double().square().sum() / x.double().square().sum()
    assert 1 - lost.item() == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize("codec", WITH_MEMORY, ids=str)
def test_sent_plus_memory_is_what_came_in_exactly(codec):
    """Multiples of 2^-20 and scales of 24 bits: float64 holds every sum."""
    memory, came, sent = codec.start(777, torch.float64), torch.zeros(777).double(), torch.zeros(777).double()
    for step in range(50):
        x = (gaussian(step, 777, torch.float64) * 2**10).round() / 2**10
        came += x
        sent += decoded(codec, x, memory, key_of(1, step))
    assert torch.equal(sent + memory, came)
    assert memory.abs().max() > 0


@pytest.mark.parametrize("codec", ALL, ids=str)
@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 511, 512, 513, 1025, 4099])
def test_payloads_have_the_bytes_of_the_formula_and_are_exact_where_x_is(codec, size):
    x = gaussian(size, size)
    encoded = codec.encode(x, codec.start(size, x.dtype), 5)
    assert encoded.dim() == 1
    assert encoded.is_contiguous()
    assert encoded.nbytes == codec.payload_bytes(size, x.dtype)
    received = torch.frombuffer(bytearray(b"?" + encoded.view(torch.uint8).numpy().tobytes()), dtype=torch.uint8)[1:]
    again = received.clone().view(encoded.dtype) if encoded.dtype != torch.uint8 else received  # at an odd address
    both = [codec.decode(one, size, x.dtype) for one in (encoded, again)]
    assert torch.equal(*both)
    nothing = torch.zeros(size)
    assert torch.equal(decoded(codec, nothing, codec.start(size, x.dtype)), nothing)


@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_bits(bits):
    """What lies on a level is that level, whatever its neighbours' codes and the random numbers are."""
    codec = QSGD(bits=bits, bucket=64)
    levels = torch.randint(
        -codec.levels, codec.levels + 1, (1003,), generator=torch.Generator().manual_seed(bits)
    ).float()
    levels[::64] = codec.levels
    for key in (0, 1, 2**64 - 1):
        assert torch.equal(decoded(codec, levels, key=key), levels)
    assert codec.payload_bytes(1003, torch.float32) == 4 * 16 + 126 * bits


def test_the_same_key_gives_the_same_codes_and_another_gives_others():
    x, codec = gaussian(1, 3000), QSGD()
    codes = [
        codec.encode(x, None, key) for key in (key_of(1, 2), key_of(1, 2), key_of(1, 3), key_of(2, 2), 5, 5 + 2**32)
    ]
    assert torch.equal(codes[0], codes[1])
    for other in codes[2:]:
        assert 0.2 < (codes[0] != other).double().mean() < 0.9
    assert not torch.equal(codes[4], codes[5])
    rounding = [(codec.decode(one, 3000, x.dtype) - x).double() for one in (codes[0], codes[3])]
    correlation = torch.corrcoef(torch.stack(rounding))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(3000)  # errors of two workers are independent


@pytest.mark.parametrize("codec", ALL, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 700])
def test_what_is_not_finite_is_refused_and_the_memory_unharmed(codec, bad, at):
    x = gaussian(1, 1000)
    memory = codec.start(1000, x.dtype)
    codec.encode(x, memory, 1)
    before = None if memory is None else memory.clone()
    x[at] = bad
    with pytest.raises(NotFiniteError):
        codec.encode(x, memory, 2)
    assert memory is None or torch.equal(memory, before)


@pytest.mark.parametrize("codec", [QSGD(), Ternary(), Sign(), DQ()], ids=str)
def test_scales_that_nobody_sends_are_refused(codec):
    payload = codec.encode(gaussian(1, 100), codec.start(100, torch.float32)).clone()
    at = 4 if isinstance(codec, DQ) else 0
    for bad in (math.nan, -1.0, math.inf):
        payload[at : at + 4] = torch.tensor([bad]).view(torch.uint8)
        with pytest.raises(ValueError, match="scale"):
            codec.decode(payload, 100, torch.float32)


@pytest.mark.parametrize("codec", [QSGD(), DQ(), Sign(), Ternary()], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_come_back_as_themselves(codec, dtype):
    x = gaussian(1, 600).to(dtype)
    found = decoded(codec, x, codec.start(600, dtype))
    assert found.dtype == dtype
    assert (found - x).abs().max() <= x.abs().max() * 1.01


@pytest.mark.parametrize(
    "codec", [QSGD(bits=3, norm="l2", bucket=None), DQ(target_error=0.5), Ternary(clip=2.5), Sign(bucket=64)], ids=str
)
def test_specs_of_codecs_read_back(codec):
    assert codec_registry.build(codec_registry.spec(codec)) == codec


@pytest.mark.parametrize(("spec", "said"), [
    ("qsgd(bits=0)", "bits of QSGD must be from 2 to 8, not 0"), ("qsgd(bits=40)", "from 2 to 8, not 40"),
    ("qsgd(bucket=12)", "multiple of 8"), ("power(rank=0)", "rank of Power must be 1 or more, not 0"),
    ("power(rank=5000)", "at most 1,024"),
    ("dq(target_bits=4, target_error=1)", "not both"), ("dq(target_bits=9)", "from min_bits to max_bits, 2 to 8, not 9"),
    ("dq(min_bits=6, max_bits=3)", "above its max_bits"), ("dq(alpha=0.99)", "total_steps"), ("top-k(fraction=2)", "fraction"),
])  # fmt: skip
def test_what_no_codec_can_be_is_one_sentence(spec, said):
    with pytest.raises(ValueError, match=said) as refused:
        codec_registry.build(spec)
    assert "\n" not in str(refused.value)


class Quadratics:
    """Three workers' functions whose gradients are large where those of others cancel them, and small where nothing does."""

    def __init__(self, size=30):
        self.centre = torch.full((size,), 1.0, dtype=torch.float64)
        self.pull = torch.zeros(3, size, dtype=torch.float64)
        self.pull[:, 0] = torch.tensor([20.0, -10.0, -10.0])

    def gradient(self, worker, x):
        return (x - self.centre) + self.pull[worker]


@pytest.mark.parametrize("feedback", [True, False])
def test_top_k_stalls_without_memory_and_converges_with_it(feedback):
    problem, codec = Quadratics(), TopK(fraction=1 / 30)
    x = torch.zeros(30, dtype=torch.float64)
    memories = [codec.start(30, torch.float64) for _ in range(3)]
    for _ in range(4000):
        sent = []
        for worker in range(3):
            sent.append(decoded(codec, problem.gradient(worker, x), memories[worker]))
            if not feedback:
                memories[worker].zero_()
        x -= 0.002 * sum(sent) / 3
    distance = (x - problem.centre).norm().item()
    start = problem.centre.norm().item()
    assert distance < 0.1 * start if feedback else distance > 0.5 * start


@pytest.mark.parametrize("codec", UNBIASED, ids=str)
def test_zeros_stay_zero_beside_the_smallest_numbers(codec):
    x = torch.zeros(1500)
    x[3], x[7] = 1e-41, -2e-38
    got = decoded(codec, x, key=key_of(7, 1))
    assert not got[[index for index in range(1500) if index not in (3, 7)]].any()
    assert got.abs().max() <= 2.001e-38  # the Euclidean norm is larger than the largest
