"""PowerSGD's mean of low-rank factors, by two all-reduces; the first also carries small parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.compression.codec import WHAT
from paceline.compression.mean import Totals
from paceline.compression.pieces import check_slot, gaps
from paceline.compression.power import Factored, Power, check_rank, factored
from paceline.optim.flat import Ranges, within
from paceline.optim.half_types import is_finite, sum_type
from paceline.ports.ports import Handle
from paceline.system.saved_state import check_fits

if TYPE_CHECKING:
    from paceline.compression.coded_mean import CodedMean

__all__ = ["LowRankMean"]

_NUMBERS = 3  # sent along: weight used, weight given, number


class LowRankMean:
    """One vector's matrices, their factors, and the error feedback.

    Sums of float32 numbers are exact for weights up to 2^24 in all.
    """

    def __init__(self, owner: CodedMean, number: int, vector: Tensor, first: int) -> None:
        assert isinstance(owner.codec, Power)
        self.owner, self.number, self.rank = owner, number, owner.codec.rank
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
    def _matrices(owner: CodedMean, first: int, length: int) -> list[Factored]:
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

    @property
    def warms_up(self) -> bool:
        """Whether this step is sent uncompressed."""
        assert isinstance(self.owner.codec, Power)
        return self.count <= self.owner.codec.warmup_steps

    @property
    def matrices(self) -> list[Factored]:
        """The matrices sent as factors in this step."""
        return [] if self.warms_up else self._factored

    @property
    def dense(self) -> Tensor:
        """The elements sent uncompressed."""
        return self._all_dense if self.warms_up else self._dense

    def start(self, vector: Tensor, weight: float, said: float) -> LowRankUnderWay:
        self.count += 1
        return LowRankUnderWay(self, vector, weight, said)


class LowRankUnderWay:
    """One mean under way; implements `Mean`."""

    def __init__(self, slot: LowRankMean, vector: Tensor, weight: float, said: float) -> None:
        self._slot, self._vector = slot, vector
        owner, rank = slot.owner, slot.rank
        self._lefts: list[Tensor] = []
        self._totals: Totals | None = None
        self._total = 0.0
        with owner.coding(4 + rank, vector):
            torch.add(slot.memory, vector, out=slot.given)
            self._weight = owner.usable_weight(slot.given, weight)
            self._is_used = self._weight > 0
            if not self._is_used:
                slot.given.zero_()
            lefts = [right @ one.of(slot.given).T for one, right in zip(slot.matrices, slot.rights, strict=False)]
            numbers = torch.tensor([self._weight, weight, said], dtype=slot.type)
            parts = [*(left.reshape(-1) for left in lefts), slot.given[slot.dense]]
            self._sent = torch.cat([*(part * self._weight for part in parts), numbers])
        owner.count(vector.numel(), self._sent.nbytes)
        self._first: Handle | None = owner.collectives.start_all_reduce(self._stand_in(self._sent))
        self._second: Handle | None = None

    def _stand_in(self, sent: Tensor) -> Tensor:
        return sent if self._vector.numel() else self._vector

    def advance(self) -> None:
        """Orthonormalises the left factors and starts averaging the right ones."""
        if self._first is None:
            return
        self._first.wait()
        self._first = None
        slot, owner = self._slot, self._slot.owner
        self._total, weight, said = self._sent[-_NUMBERS:].tolist()
        self._totals = Totals(weight, said)
        if self._vector.numel() and not self._total > 0:  # zero or NaN, as all workers know
            self._total = 0.0
            return
        with owner.coding(4 + slot.rank, self._vector):
            self._sent.div_(self._total or 1.0)
            if not is_finite(self._sent):  # finite numbers, but not their sum
                self._total = 0.0
                return
            sizes = [slot.rank * one.rows for one in slot.matrices]
            *lefts, self._dense, _ = self._sent.split([*sizes, len(slot.dense), _NUMBERS])
            self._lefts = [left.view(slot.rank, one.rows) for left, one in zip(lefts, slot.matrices, strict=True)]
            for one, left in zip(slot.matrices, self._lefts, strict=True):
                one.orthonormalize(left, slot.count)
            rights = []
            for one, left in zip(slot.matrices, self._lefts, strict=True):
                own = one.of(slot.given)
                right = left @ own
                rights.append(right.reshape(-1) * self._weight)
                if self._is_used:  # what of it the factors lack
                    torch.sub(own, left.T @ right, out=one.of(slot.memory))
            self._rights = torch.cat(rights) if rights else torch.zeros(0, dtype=slot.type)
        owner.count(0, self._rights.nbytes)
        if rights or not self._vector.numel():
            self._second = owner.collectives.start_all_reduce(self._stand_in(self._rights))

    def wait(self) -> Totals:
        """Multiplies the mean factors."""
        from paceline.compression import kernels

        self.advance()
        slot, owner, vector = self._slot, self._slot.owner, self._vector
        assert self._totals is not None
        if self._second is not None:
            self._second.wait()
        if not vector.numel():
            return self._totals
        if not self._total:
            vector.fill_(float("nan") if self._totals.weight else 0.0)
            for begin, end in slot.gaps:
                vector[begin:end] = 0
            return self._totals
        with owner.coding(4 + slot.rank, vector):
            mean = torch.zeros(len(vector), dtype=slot.type)
            mean[slot.dense] = self._dense
            rights = self._rights.div_(self._total).split([slot.rank * one.columns for one in slot.matrices])
            for at, (one, left, flat) in enumerate(zip(slot.matrices, self._lefts, rights, strict=False)):
                right = flat.view(slot.rank, one.columns)
                kernels.add_products(left.numpy(), right.numpy(), one.of(mean).numpy())
                largest = right.abs().amax(1, keepdim=True)  # rows of this length lose no product to under- or overflow
                is_known = (largest > 0) & (largest < torch.inf)  # else the row before serves again
                slot.rights[at] = torch.where(is_known, right / largest, slot.rights[at])
            vector.copy_(mean)
        return self._totals
