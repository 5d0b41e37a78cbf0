"""A store in shared memory, through which the mailboxes of a run on one machine find each other."""

from __future__ import annotations

import secrets
import zlib

import numpy as np

from paceline.memory.segment import Layout, Segment

_SLOT_BYTES = 192
_HEAD_BYTES = 6  # checksum, and length of the value


class SharedStore:
    """A short value under each of a few keys, in memory that all members map.

    A TCPStore asks a name server for the name of every connecting address, at both ends and one after the other, which takes
    5 to 10 s each if none answers. Also, the process that holds it could die.

    Only one member sets a key, or its next incarnation, or the supervisor once the member has died. A value whose write is
    under way, or whose writer was killed, fails its checksum and counts as missing.
    """

    def __init__(self, segment: Segment, offset: int, num_members: int) -> None:
        self._bytes = segment.array(offset, self.size_bytes(num_members), np.uint8).data
        keys = ["run", *(f"{what}/{member}" for what in ("peer", "ended") for member in range(num_members))]
        self._starts = {key: _SLOT_BYTES * index for index, key in enumerate(keys)}

    @staticmethod
    def reserve(layout: Layout, num_members: int) -> int:
        return layout.reserve("store", SharedStore.size_bytes(num_members))

    @staticmethod
    def size_bytes(num_members: int) -> int:
        """Size for `num_members` members: the run's name, and two values each."""
        return _SLOT_BYTES * (1 + 2 * num_members)

    def begin(self) -> None:
        """Names the run, before any member reads the name."""
        self.set("run", secrets.token_hex(8))

    def set(self, key: str, value: str) -> None:
        data = value.encode("ascii")
        body = len(data).to_bytes(2, "little") + data
        record = zlib.crc32(body).to_bytes(4, "little") + body
        if len(record) > _SLOT_BYTES:
            raise ValueError(f"{value!r} has more than {_SLOT_BYTES - _HEAD_BYTES} characters")
        start = self._starts[key]
        self._bytes[start : start + len(record)] = record

    def check(self, keys: list[str]) -> bool:
        return all(self._read(key) is not None for key in keys)

    def get(self, key: str) -> bytes:
        """The key's value; raises `RuntimeError` if it has none at this instant."""
        value = self._read(key)
        if value is None:
            raise RuntimeError(f"nothing is stored under {key!r}")
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """The run's name, set by `begin`, for a member that proposes one."""
        del expected, desired
        return self.get(key)

    def _read(self, key: str) -> bytes | None:
        start = self._starts[key]
        record = bytes(self._bytes[start : start + _SLOT_BYTES])
        end = _HEAD_BYTES + int.from_bytes(record[4:_HEAD_BYTES], "little")
        if end > _SLOT_BYTES or zlib.crc32(record[4:end]) != int.from_bytes(record[:4], "little"):
            return None
        return record[_HEAD_BYTES:end]
