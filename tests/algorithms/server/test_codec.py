"""What was sent plus what was kept is the gradient plus what was kept before; and the payloads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms.server.registries import codec_registry
from paceline.compression.bf16 import BFloat16
from paceline.compression.codec import NoCodec
from paceline.compression.top_k import TopK

CODECS = [NoCodec(), BFloat16(), BFloat16(feedback=True), TopK(), TopK(fraction=0.3), TopK(fraction=1.0)]
WITH_MEMORY = [codec for codec in CODECS if codec.start(1, torch.float32) is not None]
SIZES = [1, 2, 3, 5, 8, 101, 1000]


def draws(seed, size, dtype):
    scale = torch.logspace(-6, 3, size, dtype=torch.float64)
    return (torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("codec", WITH_MEMORY, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sent_plus_kept_is_all_there_was(codec, size, dtype):
    memory = codec.start(size, dtype)
    for step in range(10):
        gradient = draws(step, size, dtype)
        all_of_it, given = gradient + memory, gradient.clone()
        sent = codec.decode(codec.encode(gradient, memory), size, dtype)
        assert torch.equal(sent + memory, all_of_it)
        assert torch.equal(gradient, given)


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=40),
    fraction=st.floats(0.01, 1.0),
)
def test_top_k_of_any_numbers(values, fraction):
    codec, gradient = TopK(fraction=fraction), torch.tensor(values)
    memory = codec.start(len(values), torch.float32)
    sent = codec.decode(codec.encode(gradient, memory), len(values), torch.float32)
    assert torch.equal(sent + memory, gradient)
    k = codec.num_kept(len(values))
    assert int(sent.count_nonzero()) == min(k, int(gradient.count_nonzero()))
    assert memory.abs().max() <= sent.abs().sort(descending=True).values[:k].min()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_payloads_are_one_contiguous_vector_of_the_announced_size(codec, size, dtype):
    encoded = codec.encode(draws(0, size, dtype), codec.start(size, dtype))
    assert encoded.dim() == 1
    assert encoded.is_contiguous()
    assert encoded.nbytes == codec.payload_bytes(size, dtype)
    copied = torch.frombuffer(
        bytearray(encoded.view(torch.uint8).numpy().tobytes()), dtype=encoded.dtype
    )  # as received
    once, again = (codec.decode(one, size, dtype) for one in (encoded, copied))
    assert once.dtype == dtype
    assert torch.equal(once, again)


def test_without_feedback_nothing_but_rounding_is_lost():
    gradient = draws(1, 50, torch.float32)
    sent = BFloat16().decode(BFloat16().encode(gradient, None), 50, torch.float32)
    assert float(((sent - gradient) / gradient).abs().max()) <= 2**-8


def test_every_element_is_sent_at_last():
    codec, gradient = TopK(fraction=0.1), torch.arange(1.0, 21.0)
    memory, total = codec.start(20, torch.float32), torch.zeros(20)
    for _ in range(400):
        total += codec.decode(codec.encode(gradient, memory), 20, torch.float32)
    assert torch.allclose(total / 400, gradient, rtol=0.6)
    assert bool((total > 0).all())


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_payload_of_another_size_is_refused(codec):
    encoded = codec.encode(torch.ones(100), codec.start(100, torch.float32))
    for wrong in (encoded[:-1], torch.cat([encoded, encoded[:1]]), encoded[None], encoded.to(torch.int64)):
        with pytest.raises(ValueError, match="A payload is"):
            codec.decode(wrong, 100, torch.float32)


@pytest.mark.parametrize("index", [-1, 100, 2**31 - 1])
def test_top_k_does_not_write_beyond_the_vector(index):
    codec = TopK(fraction=0.02)
    payload = codec.encode(torch.ones(100), codec.start(100, torch.float32))
    payload[:4] = torch.tensor([index], dtype=torch.int32).view(torch.uint8)
    with pytest.raises(ValueError, match="beyond its 100"):
        codec.decode(payload, 100, torch.float32)


def test_specs():
    assert codec_registry.build("top-k(fraction=0.05)") == TopK(fraction=0.05)
    for codec in CODECS:
        assert codec_registry.build(codec_registry.spec(codec)) == codec
    for fraction in ("0", "1.5", "-1"):
        with pytest.raises(ValueError, match="fraction"):
            codec_registry.build(f"top-k(fraction={fraction})")
    with pytest.raises(ValueError, match="more shards"):
        TopK().num_kept(2**31)
