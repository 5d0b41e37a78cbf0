"""Compares what should be the same on all workers: parameters, anchors, learning rates."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from paceline.algorithms.round_messages import Header
from paceline.errors import AlgorithmWarning, UsageError
from paceline.optim.half_types import sum_type
from paceline.optim.ranges import Ranges
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import SharedParameters

_FIRST, _EVERY = 10, 100  # replicas are compared in the first 10 rounds, then in every 100th
_DIGESTS = 2**50  # so that one of them is exact in float64
_ROUNDING = 16  # so many times the type's precision for each step, but at most:
_MOST_ROUNDING = 2.0**-5

_STATE = ("_num_notes", "_equal_at", "digest", "_takes_first", "_has_warned")

_NOT_ALIKE = (
    "At step {step} the workers' parameters differ, and this method keeps them equal. Either the loops changed them outside"
    " optimizer.step() in different ways; or each changed gradients after backward by its own data; or the optimizer's step"
    " draws noise. Make all workers do the same, such as by worker.mean or an equal seed, or use ad-psgd."
)
_OTHER_RATES = (
    "At step {step} the workers' learning rates differ. Either ReduceLROnPlateau follows each worker's own loss, or only some"
    " workers step a scheduler: step it by worker.mean(loss), or use worker.follow(scheduler)."
)
_ONLY_ROUNDED = (
    "At step {step} the workers' parameters differ by rounding, which happens on different processors. All workers"
    " continue with the first worker's, now and whenever this happens again, without another warning."
)


class EqualReplicas:
    """Compares vectors that should be the same on all workers.

    In the first 10 rounds and then in every 100th, headers carry some bits of their digest, and of the learning rates'. If
    these differ, the workers exchange whole digests. If vectors differ by rounding, as between machines with different
    processors, all continue with the first worker's, with one warning; any other difference ends the run.

    Costs: a pass over memory for each digest.

    Attributes:
        digest: for the header of the present round; 0: it is not compared.
    """

    def __init__(self, replica: Replica, ports: Ports[SharedParameters]) -> None:
        self._replica, self._ports = replica, ports
        self._vectors: Sequence[torch.Tensor] = ()
        self._ranges: Ranges | None = None
        self._num_notes = self._equal_at = self.digest = 0
        self._takes_first = self._has_warned = False

    @property
    def compares(self) -> bool:
        """Whether replicas are compared in every round, as in the first ones."""
        return self._replica.round is not None and self._num_notes <= _FIRST

    def note(self, vectors: Sequence[torch.Tensor], ranges: Ranges | None = None) -> None:
        """From now on all workers should have the same `vectors`, which are views, and the same learning rates.

        Args:
            vectors: of the same lengths on all workers.
            ranges: of their tensors, each with its own scale; None: each vector is one tensor.
        """
        num_workers = self._ports.num_workers
        if self._replica.round is None or num_workers == 1:
            return
        self._vectors, self._ranges = vectors, ranges
        self._num_notes += 1
        if self._takes_first:
            for vector in vectors:
                vector.copy_(self._of_first(vector))
            self._takes_first, self._equal_at = False, self._num_notes
        is_due = self._num_notes <= _FIRST or self._num_notes % _EVERY == 0
        self.digest = hash(self.digests()) % Header.num_digests(num_workers) if is_due else 0

    def note_equal(self) -> None:
        """Notes that all members' digests of the present round are equal."""
        if self.digest:
            self._equal_at = self._num_notes

    def digests(self) -> tuple[float, float]:
        """Of the vectors and of the learning rates, as they are now."""
        if self._replica.round is None:  # no loop of the user's
            return 0.0, 0.0
        return float(sum(map(_sum_of_words, self._vectors)) % _DIGESTS), float(self._replica.rates)

    def compare(self, if_apart: str = "") -> None:
        """All compare their vectors, as digests differ; those that differ by rounding become equal at the next `note`.

        Args:
            if_apart: the error's message; empty: what usually causes it.

        Raises:
            UsageError: vectors differ by more than rounding.
        """
        told = torch.zeros(1, dtype=torch.float64)
        for vector in self._vectors:
            ranges = self._ranges if self._ranges is not None else ((0, len(vector)),)
            told += _are_apart(vector, self._of_first(vector), ranges, 1 + self._num_notes - self._equal_at)
        collectives = self._ports.collectives
        assert collectives is not None
        collectives.start_all_reduce(told).wait()
        if told:
            raise UsageError(if_apart or _NOT_ALIKE.format(step=self._replica.step))
        self._takes_first = True  # not now, as a step is under way
        if not self._has_warned and self._ports.worker_id == collectives.members[0]:
            self._has_warned = True
            warnings.warn(_ONLY_ROUNDED.format(step=self._replica.step), AlgorithmWarning, stacklevel=2)

    def _of_first(self, vector: torch.Tensor) -> torch.Tensor:
        """The first worker's vector: if that one dies meanwhile, the next one's."""
        collectives = self._ports.collectives
        assert collectives is not None
        while True:
            first = collectives.members[0]
            found = vector.clone() if self._ports.worker_id == first else torch.zeros_like(vector)
            collectives.start_all_reduce(found).wait()
            if first in collectives.members:
                return found

    # For newcomers

    def for_newcomers(self, vectors: Sequence[torch.Tensor] = ()) -> dict[str, Any]:
        """What a newcomer needs; from now on, compares as often as in the first rounds.

        Args:
            vectors: which all workers have the same; () if they `note` them before the next mean.
        """
        self._num_notes = self._equal_at = 0
        self._vectors = vectors
        return {name: getattr(self, name) for name in _STATE}

    def enter(self, given: dict[str, Any], vectors: Sequence[torch.Tensor] = ()) -> None:
        vars(self).update(given)
        self._vectors = vectors


def _sum_of_words(vector: torch.Tensor) -> int:
    """The sum of 8-byte words; elements after the last whole word do not count."""
    return int(vector[: len(vector) - len(vector) % (8 // vector.itemsize)].view(torch.int64).sum())


def _are_apart(own: torch.Tensor, first: torch.Tensor, ranges: Ranges, num_steps: int) -> bool:
    """Whether two vectors differ by more than these steps' rounding, relative to their tensors' largest values."""
    most = min(_ROUNDING * torch.finfo(own.dtype).eps * num_steps, _MOST_ROUNDING)
    wide = sum_type(own.dtype)
    difference, size = (own.to(wide) - first).abs_(), first.to(wide).abs()
    pieces = ((begin, end) for begin, end in ranges if begin < end <= len(own))
    return not all(bool(difference[begin:end].max() <= most * size[begin:end].max()) for begin, end in pieces)


def check_rates(rates: Sequence[float], step: int) -> None:
    """Compares the workers' digests of learning rates, except for digests of 0; raises `UsageError` if they differ."""
    if len({rate for rate in rates if rate}) > 1:
        raise UsageError(_OTHER_RATES.format(step=step))
