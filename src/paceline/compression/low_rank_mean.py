"""PowerSGD's mean of low-rank factors, by two all-reduces; the first also carries small parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.compression.codec import WHAT
from paceline.compression.coding import Coding
from paceline.compression.mean import Mean, Steps, Totals
from paceline.compression.pieces import check_slot, gaps
from paceline.compression.power import Factored, Power, check_rank, factored
from paceline.optim.half_types import is_finite, sum_type
from paceline.optim.ranges import Ranges, within
from paceline.ports.ports import NUM_NUMBERS
from paceline.system.saved_state import check_fits

_NUMBERS = 2 + NUM_NUMBERS  # sent along: weight used, weight given, numbers


class LowRankMean:
    """One vector's matrices, their factors, and the error feedback.

    Sums of float32 numbers are exact for weights up to 2^24 in all.
    """

    def __init__(self, owner: Coding, number: int, vector: Tensor, first: int) -> None:
        assert isinstance(owner.codec, Power)
        self.owner, self.rank, self._warmup_steps = owner, owner.codec.rank, owner.codec.warmup_steps
        self._first = first
        self.type = sum_type(vector.dtype)
        length = vector.numel()
        self._factored = self._matrices(owner, first, length)
        self.rights = [one.first_factor(self.rank).to(self.type) for one in self._factored]
        self.memory = torch.zeros(length, dtype=self.type)
        self._before = self.memory, self.rights
        self.count = 0
        self.share = 0.0  # that this worker had in the mean that its memory is left over from
        covered = torch.zeros(length, dtype=torch.bool)
        for one in self._factored:
            covered[one.first : one.first + one.length] = True
        self.gaps = gaps(owner.ranges, first, length)
        self._all_dense = torch.arange(length)
        self._dense = (~covered).nonzero().view(-1)
        self.given = torch.zeros(length, dtype=self.type)

    @staticmethod
    def _matrices(owner: Coding, first: int, length: int) -> list[Factored]:
        assert isinstance(owner.codec, Power)
        if not length or owner.ranges is None:
            return []
        check_rank(owner.codec, owner.model_shapes)  # a part of the model may have nothing that becomes smaller
        own = factored(owner.codec, owner.shapes, [begin for begin, _ in owner.ranges])
        return [one._replace(first=one.first - first) for one in own if first <= one.first < first + length]

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "memory": self.memory, "share": self.share, "rights": self.rights}

    def load(self, kept: dict[str, Any] | None) -> None:
        if kept is None:
            return
        if "memory" not in kept:  # another worker's
            check_fits(kept, {"count": int, "rights": self.rights}, WHAT)
            self.count, self.rights = kept["count"], list(kept["rights"])
            return
        check_slot(kept, self.type)
        if "rights" not in kept or kept["memory"].shape != self.memory.shape:
            self.owner.does_not_fit()
            return
        check_fits(kept["rights"], self.rights, WHAT)
        self.count, self.share = kept["count"], kept["share"]
        self.memory.copy_(kept["memory"])
        self.rights = list(kept["rights"])

    def shares(self, share: float) -> None:
        if self.share not in (0.0, share):
            self.memory.mul_(self.share / share)
        self.share = share

    def note(self) -> None:
        self._before = self.memory.clone(), list(self.rights)

    def leave_out(self, ranges: Ranges) -> None:
        for begin, end in within(ranges, self._first, self._first + len(self.memory)):
            self.memory[begin:end] = self._before[0][begin:end]
            for at, one in enumerate(self._factored):
                if begin <= one.first < end:
                    self.rights[at] = self._before[1][at]

    def start(self, vector: Tensor, weight: float, numbers: Sequence[float]) -> Mean:
        self.count += 1
        return Mean(self._steps(vector, weight, numbers))

    def _steps(self, vector: Tensor, weight: float, numbers: Sequence[float]) -> Steps:
        from paceline.compression import kernels

        owner, rank = self.owner, self.rank
        warms_up = self.count <= self._warmup_steps
        matrices = [] if warms_up else self._factored  # the rest is sent uncompressed
        dense = self._all_dense if warms_up else self._dense
        with owner.coding(4 + rank, vector):
            torch.add(self.memory, vector, out=self.given)
            used = owner.usable_weight(self.given, weight)
            if not used > 0:
                self.given.zero_()
        while True:  # until both operations have the same members
            with owner.coding(0, vector):
                lefts = [
                    _product(right, one.of(self.given).T) for one, right in zip(matrices, self.rights, strict=False)
                ]
                said = torch.tensor([used, weight, *numbers], dtype=self.type)
                parts = [*(left.reshape(-1) for left in lefts), self.given[dense]]
                sent = torch.cat([*(part * used for part in parts), said])
            owner.count(vector.numel(), sent.nbytes)
            members = yield owner.collectives.start_all_reduce(sent if vector.numel() else vector)
            total, given, *sums = sent[-_NUMBERS:].tolist()
            totals = Totals(given, sums, members)
            *flat, exact, _ = sent.split([*(rank * one.rows for one in matrices), len(dense), _NUMBERS])
            lefts = [left.view(rank, one.rows) for left, one in zip(flat, matrices, strict=True)]
            averaged = None
            if total > 0 or not vector.numel():  # else zero or NaN, as all workers know
                with owner.coding(4 + rank, vector):
                    if is_finite(sent.div_(total or 1.0)):  # else finite numbers, but not their sum
                        averaged = self._right_factors(matrices, lefts, used)
            if averaged is None:
                yield None
                if vector.numel():
                    vector.fill_(float("nan") if totals.weight else 0.0)
                    for begin, end in self.gaps:
                        vector[begin:end] = 0
                return totals
            owner.count(0, averaged.nbytes)
            if not vector.numel():
                yield owner.collectives.start_all_reduce(vector)
                return totals
            alive = yield owner.collectives.start_all_reduce(averaged) if matrices else None
            if not matrices or tuple(alive) == tuple(members):
                break
        with owner.coding(4 + rank, vector):
            mean = torch.zeros(len(vector), dtype=self.type)
            mean[dense] = exact
            flat = averaged.div_(total).split([rank * one.columns for one in matrices])
            for at, (one, left, values) in enumerate(zip(matrices, lefts, flat, strict=False)):
                right = values.view(rank, one.columns)
                kernels.add_products(left.numpy(), right.numpy(), one.of(mean).numpy())
                largest = right.abs().amax(1, keepdim=True)  # rows of this length lose no product to under- or overflow
                is_known = (largest > 0) & (largest < torch.inf)  # else the row before serves again
                self.rights[at] = torch.where(is_known, right / largest, self.rights[at])
            vector.copy_(mean)
        return totals

    def _right_factors(self, matrices: list[Factored], lefts: list[Tensor], used: float) -> Tensor:
        """This worker's, weighted; makes the left ones orthonormal, and keeps what of its matrices the factors lack."""
        for one, left in zip(matrices, lefts, strict=True):
            one.orthonormalize(left, self.count)
        rights = [torch.zeros(0, dtype=self.type)]
        for one, left in zip(matrices, lefts, strict=True):
            own = one.of(self.given)
            right = _product(left, own)
            rights.append(right.reshape(-1) * used)
            if used > 0:
                torch.sub(own, _product(left.T, right), out=one.of(self.memory))
        return torch.cat(rights)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Their product in their own type, also in a loop that calls `backward` or `step` under autocast."""
    with torch.autocast(one.device.type, enabled=False):
        return one @ other
