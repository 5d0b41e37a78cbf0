"""Codecs that remember: what one message has of a vector, and that nothing is lost, whatever the vector and its type."""

import math

import pytest
import torch

from compression.worlds import WITH_MEMORY, gaussian, vectors
from paceline.compression.bf16 import BFloat16
from paceline.compression.codec import NotFiniteError
from paceline.compression.fp16 import Float16
from paceline.compression.registry import codec_registry
from paceline.compression.sign import Sign
from paceline.compression.top_k import TopK

SIZES = (1, 2, 7, 9, 511, 512, 513, 1300)
VECTORS = [(size, what) for size in SIZES for what in vectors(size)]


def decoded(codec, x, memory=None):
    return codec.decode(codec.encode(x, memory), len(x), x.dtype)


def share_lost(codec, x):
    """||x - C(x)||^2 / ||x||^2, with numbers that no square overflows."""
    size = x.abs().max().double()
    error = (decoded(codec, x, codec.start(len(x), x.dtype)).double() - x.double()) / size
    return (error.square().sum() / (x.double() / size).square().sum()).item()


def test_every_codec_is_right_on_average_or_remembers_or_rounds_to_the_nearest():
    groups = [
        {"none", "qsgd", "ternary", "dq"},
        {name for name, cls in codec_registry.items() if cls().remembers},
        {"fp16", "bf16", "power"},
    ]
    assert sorted(name for group in groups for name in group) == sorted(codec_registry)
    assert {codec_registry.name_of(type(codec)) for codec in WITH_MEMORY} == groups[1] | {"bf16"}


@pytest.mark.parametrize(("size", "what"), [one for one in VECTORS if one[1] != "zeros"])
def test_one_message_contracts_by_the_exact_law(size, what):
    x = vectors(size)[what]
    if not x.any():
        return
    rounding = 2.0**-150 / x.abs().max().double().item() * math.sqrt(size) + 1e-6
    z = x.double() / x.abs().max().double()
    total = z.square().sum()
    for bucket in (8, 512, None):
        kept = sum(part.abs().sum().square() / len(part) for part in z.split(bucket or size))
        assert share_lost(Sign(bucket=bucket), x) == pytest.approx((1 - kept / total).item(), abs=3 * rounding)
    for fraction in (0.01, 0.3, 1.0):
        k = max(1, round(fraction * size))
        lost = (z.square().sort().values[: size - k].sum() / total).item()
        assert share_lost(TopK(fraction=fraction), x) == pytest.approx(lost, abs=rounding)
        assert lost <= 1 - k / size + 1e-12


@pytest.mark.parametrize(("size", "what"), VECTORS)
@pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=str)
def test_half_types_are_the_nearest(codec, size, what):
    x = vectors(size)[what]
    half, digits, smallest = (
        (torch.float16, 11, 2.0**-25) if isinstance(codec, Float16) else (torch.bfloat16, 8, 2.0**-134)
    )
    if not x.to(half).isfinite().all():
        with pytest.raises(NotFiniteError):
            codec.encode(x, None)
        return
    got = decoded(codec, x)
    assert bool(((got.double() - x.double()).abs() <= 2.0**-digits * x.double().abs() + smallest).all())
    assert torch.equal(decoded(codec, got), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codec", WITH_MEMORY, ids=str)
def test_nothing_is_lost(codec, dtype):
    """Sums are rounded as numbers of 24 bits are, once a step, also where gradients have 8 or 11."""
    for size in (1, 9, 513):
        for what, vector in vectors(size).items():
            largest = vector.abs().max().double()
            most = 1.0 if dtype == torch.float16 else min(1e30, largest)
            x = (vector.double() / largest.clamp_min(1e-300) * most).to(dtype)
            memory, came = codec.start(size, dtype), torch.zeros(size, dtype=torch.float64)
            sent, steps = torch.zeros_like(came), 30
            for step in range(steps):
                given = x if step % 3 else x.flip(0)
                came += given.double()
                sent += decoded(codec, given, memory).double()
            allowed = steps * 2.0**-23 * came.abs().max() * steps + 2.0**-149
            assert bool(((sent + memory.double() - came).abs() <= allowed).all()), (what, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codec", WITH_MEMORY, ids=str)
def test_small_gradients_of_half_types_add_up(codec, dtype):
    """In the memory's own 8 or 11 bits a small gradient would vanish next to what has been kept."""
    n, steps = 64, 4000
    x = torch.full((n,), 2.0**-10, dtype=dtype)
    x[:8] = torch.tensor([1.0, -1.0] * 4)
    memory, sent = codec.start(n, dtype), torch.zeros(n, dtype=torch.float64)
    for _ in range(steps):
        sent += decoded(codec, x, memory).double()
    assert torch.allclose(sent + memory.double(), steps * x.double(), rtol=1e-3)


@pytest.mark.parametrize("codec", WITH_MEMORY, ids=str)
def test_a_sum_that_overflows_is_refused_and_the_memory_unharmed(codec):
    memory = codec.start(20, torch.float32)
    memory[7], before = 3e38, memory.clone()
    before[7] = 3e38
    with pytest.raises(NotFiniteError):
        codec.encode(torch.full((20,), 3e38), memory)
    assert torch.equal(memory, before)


def test_top_k_sends_of_a_sum_what_the_type_can_hold():
    codec, memory = TopK(fraction=0.1), torch.zeros(10)
    memory[3] = 1e5
    x = torch.ones(10, dtype=torch.float16)
    assert decoded(codec, x, memory)[3] == 65504
    assert memory[3] == 1e5 + 1 - 65504


@pytest.mark.parametrize("codec", [Sign(), Sign(bucket=8), TopK(fraction=0.3), BFloat16(feedback=True)], ids=str)
def test_a_memory_of_nothing_changes_nothing(codec):
    x = gaussian(1, 100)
    assert torch.equal(decoded(codec, x, torch.zeros(100)), decoded(codec, x, codec.start(100, x.dtype)))
    memory = 0.5 * gaussian(2, 100)
    assert torch.equal(decoded(codec, x, memory.clone()), decoded(codec, x + memory, torch.zeros(100)))


def test_ties_of_top_k_are_as_many_as_asked_for():
    codec, x = TopK(fraction=0.1), torch.full((100,), -2.0)
    memory = codec.start(100, x.dtype)
    got = decoded(codec, x, memory)
    assert got.count_nonzero() == 10
    assert memory.count_nonzero() == 90


def test_zeros_have_a_sign_and_come_back():
    codec, x = Sign(bucket=None), torch.tensor([0.0, -0.0, 3.0, -1.0])
    memory = codec.start(4, x.dtype)
    assert decoded(codec, x, memory).tolist() == [1.0, 1.0, 1.0, -1.0]
    assert memory.tolist() == [-1.0, -1.0, 2.0, 0.0]


@pytest.mark.parametrize("codec", [BFloat16(), BFloat16(feedback=True)], ids=str)
def test_what_a_receiver_of_float16_would_have_as_infinity_is_refused(codec):
    with pytest.raises(NotFiniteError):
        codec.encode(torch.full((3,), 65504.0, dtype=torch.float16), codec.start(3, torch.float16))
