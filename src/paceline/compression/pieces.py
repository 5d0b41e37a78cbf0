"""A vector sent as coded pieces, one per worker: its error feedback, and its mean under way.

`CodedMean` makes these, and has what they share with other means.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.compression.codec import WHAT, Codec, Encoded, NotFiniteError, key_of, share_of
from paceline.compression.coding import Coding
from paceline.compression.mean import Mean, Steps, Totals
from paceline.errors import UsageError, name_workers
from paceline.optim.flat import Ranges, within
from paceline.optim.half_types import sum_type
from paceline.system.saved_state import check_fits

_HEAD = 32  # bytes of a piece before its payload: codec, weight used, weight given, number
_STATUS = 8  # bytes of a piece of the mean before its payload: the size of what was rounded for it, NaN: not finite


def piece_of(num_elements: int, num_workers: int) -> int:
    """Elements of a piece: whole bytes of codes.

    >>> piece_of(100, 3)
    40
    """
    return -(-num_elements // (8 * num_workers)) * 8


class Pieces:
    """One vector's memories, and its buffers."""

    def __init__(self, owner: Coding, number: int, vector: Tensor, first: int) -> None:
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
        self._kind: torch.dtype | None = None  # of payloads
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

    def _payload_type(self, codec: Codec) -> torch.dtype:
        if self._kind is None:
            nothing = torch.zeros(0, dtype=self._type)
            self._kind = codec.encode(nothing, codec.start(0, self._type)).x.dtype
        return self._kind

    def _clear_gaps(self, vector: Tensor) -> None:
        """Zeroes the gaps between parameters, which a codec or NaN may have changed."""
        for begin, end in self.gaps:
            vector[begin:end] = 0
            if self.memory is not None:
                self.memory[begin:end] = 0

    def start(self, vector: Tensor, weight: float, said: float) -> Mean:
        self.count += 1
        return Mean(self._steps(vector, weight, said))

    def _steps(self, vector: Tensor, weight: float, said: float) -> Steps:
        owner = self._owner
        if owner.num_workers == 1:
            return Totals(weight, said)
        if not self._length:
            return (yield from self._timed_steps(vector, weight, said))
        codec, workers = owner.tuner.codec, owner.num_workers
        moves, key = owner.moves_of(codec), key_of(owner.seed, self.count, self._number)
        size = codec.payload_bytes(self.piece, self.given.dtype)
        padded, kind = -(-size // 8) * 8, self._payload_type(codec)
        given = torch.zeros(workers, _HEAD + padded, dtype=torch.uint8)
        taken = torch.empty_like(given)
        with owner.coding(moves.encoding + 3, vector):
            used = owner.usable_weight(vector, weight)
            if used > 0 and not self._encode(codec, vector, given[:, _HEAD : _HEAD + size], key):
                used = owner.weight_left_out()
        head = torch.tensor([owner.fingerprint, used, weight, said], dtype=torch.float64)
        given[:, :_HEAD] = head.view(torch.uint8)
        owner.count(vector.numel(), given.nbytes)
        yield owner.collectives.start_all_to_all(given.view(-1), taken.view(-1))
        heads = taken[:, :_HEAD].contiguous().view(torch.float64).tolist()
        self._check_codecs(heads)
        weights = [head[1] for head in heads]
        totals = Totals(sum(head[2] for head in heads), sum(head[3] for head in heads))
        if not sum(weights) > 0:  # zero or NaN, as all workers know
            yield None
            vector.fill_(float("nan") if totals.weight else 0.0)
            self._clear_gaps(vector)
            owner.finished(self._number, 0.0)
            return totals

        def encoded(payload: Tensor) -> Encoded:
            return Encoded(payload if kind == torch.uint8 else payload.view(kind))

        def decoded(payload: Tensor) -> Tensor:
            return codec.decode(encoded(payload), self.piece, self.given.dtype)

        # This worker's piece of the mean is added up, and coded again.
        unit = next(one for one in weights if one)
        part, error = torch.zeros(_STATUS + padded, dtype=torch.uint8), 0.0
        with owner.coding(moves.decoding + 3 + (moves.encoding + 2) / workers, vector):
            mean = torch.zeros(self.piece, dtype=self.given.dtype)
            total = sum(weight / unit for weight in weights)
            for weight, payload in zip(weights, taken[:, _HEAD : _HEAD + size], strict=True):
                if weight:
                    mean.add_(decoded(payload), alpha=weight / unit)
                    error += (weight / unit / total) ** 2 * owner.tuner.coded_size(encoded(payload), self.piece)
            mean.div_(total)
            try:
                coded = codec.encode(mean, self.second, key_of(key, workers))
                part[_STATUS : _STATUS + size] = coded.x.view(torch.uint8)
                error += owner.tuner.coded_size(encoded(part[_STATUS : _STATUS + size]), self.piece)
            except NotFiniteError:  # finite numbers, but not their sum
                error = math.nan
        part[:_STATUS].view(torch.float64).fill_(error)
        pieces = torch.empty(workers, _STATUS + padded, dtype=torch.uint8)
        yield owner.collectives.start_all_gather(part, pieces.view(-1))
        errors = pieces[:, :_STATUS].contiguous().view(torch.float64).view(-1).tolist()
        with owner.coding(moves.decoding + 2, vector):
            payloads = pieces[:, _STATUS : _STATUS + size]
            for error, payload, part in zip(errors, payloads, vector.split(self.piece), strict=False):
                part.fill_(error) if math.isnan(error) else part.copy_(decoded(payload)[: len(part)])
            if self.memory is not None or any(map(math.isnan, errors)):
                self._clear_gaps(vector)
        owner.finished(self._number, sum(errors))
        return totals

    def _encode(self, codec: Codec, vector: Tensor, payloads: Tensor, key: int) -> bool:
        """Codes all pieces into the rows; returns whether they are finite. If not, the memory is unchanged."""
        self.given[: vector.numel()] = vector
        parts = self.given.view(len(payloads), -1)
        memories = [None] * len(parts) if self.memory is None else list(self.memory.view_as(parts))
        done: list[Encoded] = []
        for worker, (payload, part, memory) in enumerate(zip(payloads, parts, memories, strict=True)):
            try:
                done.append(codec.encode(part, memory, key_of(key, worker)))
            except NotFiniteError:
                for before, given, one in zip(memories, parts, done, strict=False):  # what was coded is not sent
                    if before is not None:
                        before.add_(codec.decode(one, self.piece, self.given.dtype)).sub_(given)
                return False
            payload.copy_(done[-1].x.view(torch.uint8))
        return True

    def _check_codecs(self, heads: list[list[float]]) -> None:
        owner = self._owner
        others = [worker for worker, head in enumerate(heads) if head[0] != owner.fingerprint]
        if others:
            raise UsageError(
                f"{name_workers(others).capitalize()} sent gradients with a codec other than worker "
                f"{owner.worker_id}'s, {owner.codec}: name the same one on every worker."
            )

    def _timed_steps(self, vector: Any, weight: float, said: float) -> Steps:
        """For a vector without elements: only its time is simulated."""
        owner = self._owner
        codec, workers = owner.tuner.codec, owner.num_workers
        moves = owner.moves_of(codec)
        stand_in = vector.coded(share_of(codec)) if hasattr(vector, "coded") else vector
        num_bytes = getattr(vector, "num_bytes", None)
        if num_bytes is not None:
            size = _HEAD + -(-codec.payload_bytes(piece_of(num_bytes // 4, workers), torch.float32) // 8) * 8
            stand_in = vector.standing_for(workers * size)
            owner.count(num_bytes // 4, workers * size)
        with owner.coding(moves.encoding + 3, vector):
            pass
        yield owner.collectives.start_all_to_all(stand_in, stand_in)
        with owner.coding(moves.decoding + 3 + (moves.encoding + 2) / workers, vector):
            pass
        yield owner.collectives.start_all_gather(stand_in, stand_in)
        with owner.coding(moves.decoding + 2, vector):
            pass
        return Totals(weight * workers, said * workers)


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
