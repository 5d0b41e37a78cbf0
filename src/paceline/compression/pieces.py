"""A vector sent as coded pieces, one per worker: its error feedback, and its mean under way.

`CodedMean` makes these, and has what they share with other means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.compression.codec import WHAT, Codec, NotFiniteError, key_of, share_of
from paceline.compression.coding import Coding
from paceline.compression.mean import Mean, Steps, Totals
from paceline.compression.piece_codes import HEAD, Head, PieceCodes, heads_of
from paceline.errors import UsageError, name_workers
from paceline.optim.half_types import is_finite, sum_type
from paceline.optim.ranges import Ranges, within
from paceline.system.saved_state import check_fits

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
        if "memory" not in kept:  # another worker's
            self.count = kept["count"]
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
            self._kind = codec.encode(nothing, codec.start(0, self._type)).dtype
        return self._kind

    def _clear_gaps(self, vector: Tensor) -> None:
        """Zeroes the gaps between parameters, which a codec or NaN may have changed."""
        for begin, end in self.gaps:
            vector[begin:end] = 0
            if self.memory is not None:
                self.memory[begin:end] = 0

    def start(self, vector: Tensor, weight: float, numbers: Sequence[float]) -> Mean:
        self.count += 1
        return Mean(self._steps(vector, weight, numbers))

    def _steps(self, vector: Tensor, weight: float, numbers: Sequence[float]) -> Steps:
        owner = self._owner
        if owner.num_workers == 1:
            return Totals(weight, list(numbers), [0])
        if not self._length:
            return (yield from self._timed_steps(vector, weight, numbers))
        codec, workers = owner.tuner.codec, owner.num_workers
        moves, key = owner.moves_of(codec), key_of(owner.seed, self.count, self._number)
        codes = PieceCodes(owner.tuner, self.piece, self.given.dtype, self._payload_type(codec))
        given, taken = codes.rows(workers), codes.rows(workers)
        with owner.coding(moves.encoding + 3, vector):
            used = owner.usable_weight(vector, weight)
            if used > 0 and not self._encode(codec, vector, codes.payloads(given), key):
                used = owner.weight_left_out()
        given[:, :HEAD] = Head(owner.fingerprint, used, weight, numbers).bytes()
        owner.count(vector.numel(), given.nbytes)
        members = yield owner.collectives.start_all_to_all(given.view(-1), taken.view(-1))
        totals, weights = self._totals(taken, members)
        if not sum(weights.values()) > 0:  # zero or NaN, as all workers know
            yield None
            return self._without_weights(vector, totals)
        second = self.second if self.second is None else self.second.clone()
        with owner.coding(moves.decoding + 3 + (moves.encoding + 2) / workers, vector):
            part = self._own_piece(codec, codes, taken, weights, key_of(key, workers))
        pieces = torch.zeros(workers, len(part), dtype=torch.uint8)
        # The dead workers' pieces have no owner: every worker adds them up itself.
        lost = {worker: codes.rows(workers) for worker in range(workers) if worker not in members}
        started = [owner.collectives.start_all_gather(part, pieces.view(-1))]
        started += [owner.collectives.start_all_gather(given[one], rows.view(-1)) for one, rows in lost.items()]
        owner.count(0, given.nbytes * len(lost))
        alive = members
        for one in started:
            alive = yield one
        if tuple(alive) != tuple(members):  # every worker adds up all pieces, so that these contain the same workers
            if second is not None and self.second is not None:
                self.second.copy_(second)
            rows = codes.rows(workers, workers)
            owner.count(0, rows.nbytes)
            alive = yield owner.collectives.start_all_gather(given.view(-1), rows.view(-1))
            totals, weights = self._totals(rows[:, owner.worker_id], alive)
            if not sum(weights.values()) > 0:
                return self._without_weights(vector, totals)
            lost = {worker: rows[:, worker] for worker in range(workers)}
        with owner.coding(moves.decoding + 2, vector):
            owner.finished(self._number, self._put(vector, codes, pieces, lost, weights))
        return totals

    def _own_piece(
        self, codec: Codec, codes: PieceCodes, taken: Tensor, weights: Mapping[int, float], key: int
    ) -> Tensor:
        """This worker's piece of the mean, coded again, after the size of what was rounded for it."""
        part = torch.zeros(_STATUS + codes.padded, dtype=torch.uint8)
        status, payload = part[:_STATUS].view(torch.float64), part[_STATUS : _STATUS + codes.size]
        mean, error = codes.mean(taken, weights)
        try:
            payload.copy_(codec.encode(mean, self.second, key).view(torch.uint8))
            status.fill_(error + codes.coded_size(payload))
        except NotFiniteError:  # finite numbers, but not their sum
            status.fill_(math.nan)
        return part

    def _put(
        self,
        vector: Tensor,
        codes: PieceCodes,
        pieces: Tensor,
        lost: Mapping[int, Tensor],
        weights: Mapping[int, float],
    ) -> float:
        """Replaces the vector by the mean: its coded pieces, and `lost` ones, of which all have the workers' codes.

        Returns the size of what was rounded for them.
        """
        errors = pieces[:, :_STATUS].contiguous().view(torch.float64).view(-1).tolist()
        for worker, piece in enumerate(vector.split(self.piece)):
            if worker in lost:
                mean, error = codes.mean(lost[worker], weights)
                errors[worker] = error if is_finite(mean) else math.nan
            else:
                mean = codes.decoded(pieces[worker, _STATUS : _STATUS + codes.size])
            piece.fill_(math.nan) if math.isnan(errors[worker]) else piece.copy_(mean[: len(piece)])
        if self.memory is not None or any(map(math.isnan, errors)):
            self._clear_gaps(vector)
        return sum(errors)

    def _totals(self, rows: Tensor, members: Sequence[int]) -> tuple[Totals, dict[int, float]]:
        """The sums of what the members' heads say, and the weights with which their vectors take part."""
        heads = heads_of(rows, members)
        others = [worker for worker, head in heads.items() if head.codec != self._owner.fingerprint]
        if others:
            raise UsageError(
                f"{name_workers(others).capitalize()} sent gradients with a codec other than worker "
                f"{self._owner.worker_id}'s, {self._owner.codec}: name the same one on every worker."
            )
        weight = sum(head.given for head in heads.values())
        numbers = [float(sum(one)) for one in zip(*(head.numbers for head in heads.values()), strict=True)]
        return Totals(weight, numbers, members), {worker: head.used for worker, head in heads.items()}

    def _without_weights(self, vector: Tensor, totals: Totals) -> Totals:
        vector.fill_(float("nan") if totals.weight else 0.0)
        self._clear_gaps(vector)
        self._owner.finished(self._number, 0.0)
        return totals

    def _encode(self, codec: Codec, vector: Tensor, payloads: Tensor, key: int) -> bool:
        """Codes all pieces into the rows; returns whether they are finite. If not, the memory is unchanged."""
        self.given[: vector.numel()] = vector
        parts = self.given.view(len(payloads), -1)
        memories = [None] * len(parts) if self.memory is None else list(self.memory.view_as(parts))
        done: list[Tensor] = []
        for worker, (payload, part, memory) in enumerate(zip(payloads, parts, memories, strict=True)):
            try:
                done.append(codec.encode(part, memory, key_of(key, worker)))
            except NotFiniteError:
                for before, given, one in zip(memories, parts, done, strict=False):  # what was coded is not sent
                    if before is not None:
                        before.add_(codec.decode(one, self.piece, self.given.dtype)).sub_(given)
                return False
            payload.copy_(done[-1].view(torch.uint8))
        return True

    def _timed_steps(self, vector: Any, weight: float, numbers: Sequence[float]) -> Steps:
        """For a vector without elements: only its time is simulated."""
        owner = self._owner
        codec, workers = owner.tuner.codec, owner.num_workers
        moves = owner.moves_of(codec)
        stand_in = vector.coded(share_of(codec)) if hasattr(vector, "coded") else vector
        num_bytes = getattr(vector, "num_bytes", None)
        if num_bytes is not None:
            size = HEAD + -(-codec.payload_bytes(piece_of(num_bytes // 4, workers), torch.float32) // 8) * 8
            stand_in = vector.standing_for(workers * size)
            owner.count(num_bytes // 4, workers * size)
        with owner.coding(moves.encoding + 3, vector):
            pass
        members = yield owner.collectives.start_all_to_all(stand_in, stand_in)
        with owner.coding(moves.decoding + 3 + (moves.encoding + 2) / workers, vector):
            pass
        gathers = [owner.collectives.start_all_gather(stand_in, stand_in) for _ in range(1 + workers - len(members))]
        for one in gathers:
            members = yield one
        with owner.coding(moves.decoding + 2, vector):
            pass
        return Totals(weight * workers, [workers * one for one in numbers], members)


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
