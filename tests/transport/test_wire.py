import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.ports.ports import Message
from paceline.transport.wire import HEADER_BYTES, MalformedFrameError, Sort, pack, sort_of, unpack

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
KINDS = st.text(st.characters(min_codepoint=1, max_codepoint=127), min_size=1, max_size=16)
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT32 = st.integers(0, 2**32 - 1)


def frames(message, sort=Sort.MESSAGE, sender=3, incarnation=2):
    head, memory = pack(sort, message, sender, incarnation)
    return head, None if memory is None else memoryview(bytearray(memory))


def bits(x):
    return x.view(torch.uint8).tolist()


@given(
    KINDS, INT64, INT64, st.floats(), UINT32, UINT32, st.sampled_from(Sort), st.sampled_from([None, *DTYPES]), st.data()
)
def test_what_is_packed_is_unpacked(kind, number, version, weight, sender, incarnation, sort, dtype, data):
    x = None
    if dtype is not None:
        raw = data.draw(st.lists(st.integers(0, 255), max_size=40))
        raw += data.draw(st.sampled_from([[], [7] * 8192]))
        x = torch.tensor(raw[: len(raw) // 8 * 8], dtype=torch.uint8).view(dtype)
    packed = frames(Message(kind, number, weight, x, version), sort, sender, incarnation)
    found_sort, received = unpack(*packed)
    assert found_sort is sort is Sort(sort_of(packed[0]))
    assert (received.sender, received.incarnation) == (sender, incarnation)
    assert received.message[:2] + received.message[4:] == (kind, number, version)
    assert received.message.weight == weight or (math.isnan(weight) and math.isnan(received.message.weight))
    if x is None:
        assert received.message.x is None
    else:
        assert received.message.x.dtype == dtype
        assert bits(received.message.x) == bits(x)


@pytest.mark.parametrize("numel", [0, 1, 25, 1025, 100_000])
def test_the_vector_belongs_to_the_receiver(numel):
    x = torch.arange(numel, dtype=torch.float32)
    received = unpack(*frames(Message("a", x=x))).received
    received.message.x.add_(1)
    assert torch.equal(received.message.x, x + 1)
    assert torch.equal(x, torch.arange(numel, dtype=torch.float32))


def test_vectors_at_odd_addresses_are_read():
    x = torch.arange(3000, dtype=torch.float64)
    head, memory = frames(Message("a", x=x))
    shifted = bytearray(1) + bytearray(memory)
    assert torch.equal(unpack(head, memoryview(shifted)[1:]).received.message.x, x)


@given(st.binary(max_size=200), st.none() | st.binary(max_size=50))
def test_random_bytes_are_malformed(head, memory):
    with pytest.raises(MalformedFrameError):
        unpack(head, None if memory is None else memoryview(bytearray(memory)))


SHORT, LONG = Message("a", x=torch.ones(3)), Message("a", x=torch.ones(5000))


def changed(message, at, value):
    head, memory = frames(message)
    return head[:at] + value + head[at + len(value) :], memory


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(changed(SHORT, 0, b"XXXX"), id="magic"),
        pytest.param(changed(SHORT, 4, b"\x01"), id="version"),
        pytest.param(changed(SHORT, 5, b"\x09"), id="sort"),
        pytest.param(changed(SHORT, 6, b"\x63"), id="dtype"),
        pytest.param(changed(SHORT, 6, b"\x00"), id="a vector without a dtype"),
        pytest.param(changed(LONG, 6, b"\x00"), id="a long vector without a dtype"),
        pytest.param(changed(SHORT, 7, b"\x01"), id="filling"),
        pytest.param(changed(SHORT, 8, b"\xe9"), id="kind that is not ASCII"),
        pytest.param(changed(SHORT, 8, b"\x00"), id="no kind"),
        pytest.param(changed(SHORT, 8, b"a\0b"), id="kind with a hole"),
        pytest.param(changed(SHORT, 48, struct.pack("<Q", 4)), id="too short for its length"),
        pytest.param(changed(LONG, 48, struct.pack("<Q", 2**63)), id="absurd length"),
        pytest.param((frames(SHORT)[0][: HEADER_BYTES - 1], None), id="cut header"),
        pytest.param((frames(SHORT)[0][:-1], None), id="cut vector"),
        pytest.param((frames(LONG)[0], frames(LONG)[1][:-4]), id="cut long vector"),
        pytest.param((frames(LONG)[0], None), id="no vector"),
        pytest.param((frames(SHORT)[0], memoryview(bytearray(12))), id="two vectors"),
        pytest.param((frames(Message("a"))[0], memoryview(bytearray(4))), id="an unannounced vector"),
    ],
)
def test_malformed_frames_are_refused(packed):
    with pytest.raises(MalformedFrameError):
        unpack(*packed)


@pytest.mark.parametrize(
    "message",
    [
        Message(""),
        Message("seventeen letters"),
        Message("é"),
        Message("a\0"),
        Message("a", 2**63),
        Message("a", x=torch.ones(2, 2)),
        Message("a", x=torch.ones(2, dtype=torch.complex64)),
    ],
)
def test_what_does_not_fit_is_refused_at_the_sender(message):
    with pytest.raises(ValueError, match=r"^A message's .*\.$"):
        pack(Sort.MESSAGE, message, 0, 0)
