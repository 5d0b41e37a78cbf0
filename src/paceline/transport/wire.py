"""A message as bytes: a header of fixed size and the memory of its vector. Nothing is pickled.

Header, little-endian: magic (4 bytes), version, sort, dtype code (1 byte each), 1 byte of zero, kind (16 bytes of ASCII,
filled up with zeros), number (i64), version (i64), weight (f64), number of elements (u64), sender (u32), incarnation (u32). A
short vector follows in the same frame, a long one is a second frame.
"""

from __future__ import annotations

import ctypes
import struct
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from paceline.ports.ports import Message, Received

_MAGIC = b"PCLM"
_VERSION = 2
_HEADER = struct.Struct("<4sBBBx16sqqdQII")
HEADER_BYTES = _HEADER.size

_DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.float16,
    4: torch.bfloat16,
    5: torch.int64,
    6: torch.uint8,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_NO_VECTOR = 0

_SHORT_BYTES = 4096  # up to this size a second frame costs more than a copy


class MalformedFrameError(Exception):
    """Bytes that no worker of this version can have sent."""


class Sort(IntEnum):
    """What a message is for: an algorithm, or the mailbox itself."""

    MESSAGE = 0
    HELLO = 1  # the first on every connection
    WELCOME = 2  # acknowledges a hello
    BYE = 3  # the last on every connection that is closed cleanly
    TAKEN = 4  # acknowledges messages by their count: as many more may be sent


_SORTS = {sort.value: sort for sort in Sort}


class Parcel(NamedTuple):
    """A parsed message."""

    sort: Sort
    received: Received


def pack(sort: Sort, message: Message, sender: int, incarnation: int) -> tuple[bytes, memoryview | None]:
    """The one or two frames of a message; the second is the vector's own memory if it is contiguous and on the CPU.

    Raises:
        ValueError: the message does not fit into them.
    """
    header, x = _pack_header(sort, message, sender, incarnation), message.x
    if x is None:
        return header, None
    if x.nbytes <= _SHORT_BYTES and x.is_cpu and x.is_contiguous():  # spares the four tensor objects below
        return header + ctypes.string_at(x.data_ptr(), x.nbytes), None
    array: Any = x.detach().to("cpu").contiguous().view(torch.uint8).numpy()
    if array.nbytes <= _SHORT_BYTES:
        return header + array.tobytes(), None
    return header, memoryview(array)


def _pack_header(sort: Sort, message: Message, sender: int, incarnation: int) -> bytes:
    kind, x = message.kind.encode("ascii", "replace"), message.x
    if not message.kind.isascii() or not 1 <= len(kind) <= 16 or b"\0" in kind:
        raise ValueError(f"A message's kind is 1 to 16 ASCII characters, not {message.kind!r}.")
    if x is not None and (x.dim() != 1 or x.dtype not in _CODES):
        raise ValueError(f"A message's vector is flat and of a plain dtype, not {x.dtype} of shape {tuple(x.shape)}.")
    code, numel = (_NO_VECTOR, 0) if x is None else (_CODES[x.dtype], x.numel())
    try:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            sort.value,  # many times faster to pack than the enum
            code,
            kind,
            message.number,
            message.version,
            message.weight,
            numel,
            sender,
            incarnation,
        )
    except struct.error as error:
        raise ValueError(f"A message's numbers must fit into 64 bits and its sender into 32: {error}.") from None


def sort_of(head: bytes) -> int:
    """The sort of a message from its first frame, or -1 if that is too short; checks nothing else."""
    return head[5] if len(head) >= HEADER_BYTES else -1


def unpack(head: bytes, memory: memoryview | None) -> Parcel:
    """Reads what `pack` wrote; a long vector keeps using `memory`, which must be writable.

    Raises:
        MalformedFrameError: `pack` cannot have written these frames.
    """
    if len(head) < HEADER_BYTES or (len(head) > HEADER_BYTES and memory is not None):
        raise MalformedFrameError(f"a first frame of {len(head)} bytes")
    magic, wire, sort, code, kind, number, version, weight, numel, sender, incarnation = _HEADER.unpack_from(head)
    if magic != _MAGIC or wire != _VERSION or head[7]:
        raise MalformedFrameError(f"no header of version {_VERSION}")
    kind = kind.rstrip(b"\0")
    if not kind or not kind.isascii() or b"\0" in kind:
        raise MalformedFrameError("a kind that is not ASCII")
    if sort not in _SORTS:
        raise MalformedFrameError(f"unknown sort {sort}")
    x = _vector(code, numel, head, memory)
    message = Message(kind.decode("ascii"), number, weight, x, version)
    return Parcel(_SORTS[sort], Received(sender, incarnation, message))


def _vector(code: int, numel: int, head: bytes, memory: memoryview | None) -> torch.Tensor | None:
    if code == _NO_VECTOR:
        if numel or memory is not None or len(head) > HEADER_BYTES:
            raise MalformedFrameError("a vector without a dtype")
        return None
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise MalformedFrameError(f"dtype code {code}")
    num_bytes = len(head) - HEADER_BYTES if memory is None else memory.nbytes
    if num_bytes != numel * dtype.itemsize:
        raise MalformedFrameError(f"{num_bytes} bytes for {numel} elements of {dtype}")
    if not numel:
        return torch.empty(0, dtype=dtype)
    if memory is None:
        return torch.frombuffer(bytearray(head), dtype=dtype, offset=HEADER_BYTES)
    x = torch.frombuffer(memory, dtype=torch.uint8)
    return (x if x.data_ptr() % dtype.itemsize == 0 else x.clone()).view(dtype)
