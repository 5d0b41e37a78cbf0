"""A vector sent as coded pieces, one per worker: its error feedback, and its mean under way.

`CodedMean` makes these, and has what they share with other means.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.compression.codec import WHAT, Codec, Encoded, NotFiniteError, key_of, share_of
from paceline.compression.mean import Alone, Mean, Totals
from paceline.errors import UsageError, name_workers
from paceline.optim.flat import Ranges, within
from paceline.optim.half_types import sum_type
from paceline.ports.ports import Handle
from paceline.system.saved_state import check_fits

if TYPE_CHECKING:
    from paceline.compression.coded_mean import CodedMean

__all__ = ["Pieces", "check_slot", "gaps", "piece_of"]

_HEAD = 32  # bytes of a piece before its payload: codec, weight used, weight given, number
_STATUS = (
    8  # bytes of a piece of the mean before its payload: the size of what was rounded for it; NaN: it is not finite
)


def piece_of(num_elements: int, num_workers: int) -> int:
    """Elements of a piece: whole bytes of codes.

    >>> piece_of(100, 3)
    40
    """
    return -(-num_elements // (8 * num_workers)) * 8


class Pieces:
    """One vector's memories, and its buffers."""

    def __init__(self, owner: CodedMean, number: int, vector: Tensor, first: int) -> None:
        self._owner = owner
        self._number, self._first = number, first
        self._length = n = vector.numel()
        self._type = sum_type(vector.dtype)
        workers = owner.num_workers
        self.piece = piece_of(n, workers)
        self.given = torch.zeros(workers * self.piece if workers > 1 else 0, dtype=self._type)
        codec = owner.tuner.codec
        self.memory = codec.start(len(self.given), self._type)
        self.second = codec.start(self.piece, self._type) if workers > 1 else None
        self.count = 0
        self.share = 0.0  # that this worker had in the mean that its memory is left over from
        self._payload_type: torch.dtype | None = None
        self._before: list[Tensor | None] = []
        self.gaps = gaps(owner.ranges, first, n)

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "memory": self.memory, "second": self.second, "share": self.share}

    def load(self, kept: dict[str, Any] | None) -> None:
        """Restores `kept`, if it is of as many workers and of the same elements."""
        if kept is None:
            return
        check_slot(kept, self._type)
        self.count = kept["count"]
        pairs = [(self.memory, kept["memory"]), (self.second, kept.get("second"))]
        if any((own is None) != (old is None) or (own is not None and own.shape != old.shape) for own, old in pairs):
            self._owner.does_not_fit()
            return
        self.share = kept["share"]
        for own, old in pairs:
            if own is not None:
                own.copy_(old)

    def shares(self, share: float) -> None:
        """Sets this worker's share of the mean, and rescales its memory to it."""
        if self.memory is not None and self.share not in (0.0, share):
            self.memory.mul_(self.share / share)
        self.share = share

    def note(self) -> None:
        """Keeps a copy of the error feedback, for `leave_out`."""
        self._before = [None if one is None else one.clone() for one in (self.memory, self.second)]

    def leave_out(self, ranges: Ranges) -> None:
        seconds = self._first + self._owner.worker_id * self.piece
        for own, before, first in zip((self.memory, self.second), self._before, (self._first, seconds), strict=True):
            if own is not None and before is not None:
                for begin, end in within(ranges, first, first + len(own)):
                    own[begin:end] = before[begin:end]

    def part_of_memory(self, worker: int) -> Tensor | None:
        """The error feedback of the piece that goes to this worker."""
        return None if self.memory is None else self.memory[worker * self.piece : (worker + 1) * self.piece]

    def payload_type(self, codec: Codec) -> torch.dtype:
        """The type of a payload's elements."""
        if self._payload_type is None:
            nothing = torch.zeros(0, dtype=self._type)
            self._payload_type = codec.encode(nothing, codec.start(0, self._type)).x.dtype
        return self._payload_type

    def clear_gaps(self, vector: Tensor) -> None:
        """Zeroes the gaps between parameters, which a codec or NaN may have changed."""
        for begin, end in self.gaps:
            vector[begin:end] = 0
            if self.memory is not None:
                self.memory[begin:end] = 0

    def start(self, vector: Tensor, weight: float, said: float) -> Mean:
        self.count += 1
        if self._owner.num_workers == 1:
            return Alone(Totals(weight, said))
        if not self._length:
            return _TimedMean(self._owner, vector, weight, said)
        return _PiecesMean(self._owner, self, self._number, vector, weight, said)


class _PiecesMean:
    """One mean under way; implements `Mean`."""

    def __init__(self, owner: CodedMean, slot: Pieces, number: int, vector: Tensor, weight: float, said: float) -> None:
        self._owner, self._slot, self._number, self._vector = owner, slot, number, vector
        self._codec = owner.tuner.codec
        self._moves = owner.moves_of(self._codec)
        self._key = key_of(owner.seed, slot.count, number)
        self._size = self._codec.payload_bytes(slot.piece, slot.given.dtype)
        given = torch.zeros(owner.num_workers, _HEAD + -(-self._size // 8) * 8, dtype=torch.uint8)
        self._taken = torch.empty_like(given)
        with owner.coding(self._moves.encoding + 3, vector):
            used = owner.usable_weight(vector, weight)
            if used > 0 and not self._encode(given):
                used = owner.weight_left_out()
        head = torch.tensor([owner.fingerprint, used, weight, said], dtype=torch.float64)
        given[:, :_HEAD] = head.view(torch.uint8)
        owner.count(vector.numel(), given.nbytes)
        self._first: Handle | None = owner.collectives.start_all_to_all(given.view(-1), self._taken.view(-1))
        self._second: Handle | None = None
        self._totals, self._is_empty = Totals(0.0, 0.0), False

    def _encode(self, given: Tensor) -> bool:
        """Codes all pieces; returns whether they are finite. If not, the memory is unchanged."""
        slot, vector = self._slot, self._vector
        slot.given[: vector.numel()] = vector
        done: list[tuple[int, Encoded]] = []
        for worker, (row, part) in enumerate(zip(given, slot.given.view(len(given), -1), strict=True)):
            try:
                encoded = self._codec.encode(part, slot.part_of_memory(worker), key_of(self._key, worker))
            except NotFiniteError:
                for before, one in done:  # what was coded is not sent
                    memory = slot.part_of_memory(before)
                    if memory is not None:
                        sent = self._codec.decode(one, slot.piece, slot.given.dtype)
                        memory.add_(sent).sub_(slot.given[before * slot.piece : (before + 1) * slot.piece])
                return False
            done.append((worker, encoded))
            row[_HEAD : _HEAD + self._size] = encoded.x.view(torch.uint8)
        return True

    def _decode(self, row: Tensor) -> Tensor:
        return self._codec.decode(self._encoded(row), self._slot.piece, self._slot.given.dtype)

    def _size_of(self, row: Tensor) -> float:
        return self._owner.tuner.coded_size(self._encoded(row), self._slot.piece)

    def _encoded(self, row: Tensor) -> Encoded:
        payload, kind = row[: self._size], self._slot.payload_type(self._codec)
        return Encoded(payload if kind == torch.uint8 else payload.view(kind))

    def advance(self) -> None:
        """Adds up this worker's piece, re-encodes it, and starts collecting all pieces."""
        if self._first is None:
            return
        self._first.wait()
        self._first = None
        owner, slot = self._owner, self._slot
        heads = self._taken[:, :_HEAD].contiguous().view(torch.float64).tolist()
        others = [worker for worker, head in enumerate(heads) if head[0] != owner.fingerprint]
        if others:
            raise UsageError(
                f"{name_workers(others).capitalize()} sent gradients with a codec other than worker "
                f"{owner.worker_id}'s, {owner.codec}: name the same one on every worker."
            )
        used = [head[1] for head in heads]
        self._totals = Totals(sum(head[2] for head in heads), sum(head[3] for head in heads))
        unit = next((one for one in used if one), 0.0)
        if not sum(used) > 0:  # zero or NaN, as all workers know
            self._is_empty = True
            return
        workers, padded = owner.num_workers, -(-self._size // 8) * 8
        moves = self._moves.decoding + 3 + (self._moves.encoding + 2) / workers
        part, size = torch.zeros(_STATUS + padded, dtype=torch.uint8), 0.0
        with owner.coding(moves, self._vector):
            mean = torch.zeros(slot.piece, dtype=slot.given.dtype)
            total = sum(weight / unit for weight in used)
            for weight, row in zip(used, self._taken, strict=True):
                if weight:
                    mean.add_(self._decode(row[_HEAD:]), alpha=weight / unit)
                    size += (weight / unit / total) ** 2 * self._size_of(row[_HEAD:])
            mean.div_(total)
            try:
                encoded = self._codec.encode(mean, slot.second, key_of(self._key, workers))
                part[_STATUS : _STATUS + self._size] = encoded.x.view(torch.uint8)
                size += self._size_of(part[_STATUS:])
            except NotFiniteError:  # finite numbers, but not their sum
                size = math.nan
        part[:_STATUS].view(torch.float64).fill_(size)
        self._taken = torch.empty(workers, _STATUS + padded, dtype=torch.uint8)
        self._second = owner.collectives.start_all_gather(part, self._taken.view(-1))

    def wait(self) -> Totals:
        self.advance()
        owner, slot, vector = self._owner, self._slot, self._vector
        if self._is_empty:
            vector.fill_(float("nan") if self._totals.weight else 0.0)
            slot.clear_gaps(vector)
            owner.finished(self._number, 0.0)
            return self._totals
        assert self._second is not None
        self._second.wait()
        sizes = self._taken[:, :_STATUS].contiguous().view(torch.float64).view(-1).tolist()
        with owner.coding(self._moves.decoding + 2, vector):
            for size, row, part in zip(sizes, self._taken, vector.split(slot.piece), strict=False):
                part.fill_(size) if math.isnan(size) else part.copy_(self._decode(row[_STATUS:])[: len(part)])
            if slot.memory is not None or any(map(math.isnan, sizes)):
                slot.clear_gaps(vector)
        owner.finished(self._number, sum(sizes))
        return self._totals


class _TimedMean:
    """A mean of vectors without elements: only its time is simulated."""

    def __init__(self, owner: CodedMean, vector: Any, weight: float, said: float) -> None:
        self._owner, self._vector, self._codec = owner, vector, owner.tuner.codec
        self._moves = owner.moves_of(self._codec)
        self._totals = Totals(weight * owner.num_workers, said * owner.num_workers)
        num_bytes = getattr(vector, "num_bytes", None)
        self._stand_in = vector.coded(share_of(self._codec)) if hasattr(vector, "coded") else vector
        if num_bytes is not None:
            piece = piece_of(num_bytes // 4, owner.num_workers)
            size = _HEAD + -(-self._codec.payload_bytes(piece, torch.float32) // 8) * 8
            self._stand_in = vector.standing_for(owner.num_workers * size)
            owner.count(num_bytes // 4, owner.num_workers * size)
        with owner.coding(self._moves.encoding + 3, vector):
            pass
        self._first: Handle | None = owner.collectives.start_all_to_all(self._stand_in, self._stand_in)
        self._second: Handle | None = None

    def advance(self) -> None:
        if self._first is None:
            return
        self._first.wait()
        self._first, moves = None, self._moves
        with self._owner.coding(moves.decoding + 3 + (moves.encoding + 2) / self._owner.num_workers, self._vector):
            pass
        self._second = self._owner.collectives.start_all_gather(self._stand_in, self._stand_in)

    def wait(self) -> Totals:
        self.advance()
        assert self._second is not None
        self._second.wait()
        with self._owner.coding(self._moves.decoding + 2, self._vector):
            pass
        return self._totals


def check_slot(kept: dict[str, Any], dtype: torch.dtype) -> None:
    """Refuses state that no vector of any length and number of workers can have."""
    vector, rights = torch.zeros(0, dtype=dtype), kept.get("rights")
    like: dict[str, Any] = {"count": int, "share": float}
    if rights is not None:
        like |= {"memory": vector, "rights": [vector.view(0, 0)] * len(rights) if isinstance(rights, list) else list}
    else:
        like |= {name: None if kept.get(name) is None else vector for name in ("memory", "second")}
    check_fits(kept, like, WHAT, sizes=False)


def gaps(ranges: Ranges | None, first: int, length: int) -> list[tuple[int, int]]:
    """The gaps between parameters in elements `first` to `first + length`, counted from there; no ranges: no gaps."""
    if ranges is None:
        return []
    found, at = [], first
    for begin, end in sorted(ranges):
        if end > first and begin < first + length:
            if begin > at:
                found.append((at - first, begin - first))
            at = end
    if at < first + length:
        found.append((at - first, length))
    return found
