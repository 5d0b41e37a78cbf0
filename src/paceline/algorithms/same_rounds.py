"""Checks that all workers go through the same rounds, and that their replicas stay equal."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from paceline.algorithms.replacements import Replacements
from paceline.algorithms.round_messages import Header, Report, Reports
from paceline.errors import AlgorithmWarning, UsageError, name_workers
from paceline.optim.flat import Ranges
from paceline.optim.half_types import sum_type
from paceline.ports.ports import Collectives, Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import SharedParameters

_FIRST, _EVERY = 10, 100  # replicas are compared in the first 10 rounds, then in every 100th
_DIGESTS = 2**50  # so that one of them is exact in float64
_ROUNDING = 16  # so many times the type's precision for each step, but at most:
_MOST_ROUNDING = 2.0**-5

_STATE = (
    "_round", "_step", "_earlier", "_since", "_followed", "_meetings", "_num_notes", "_equal_at", "_digest", "_differs",
    "_takes_first", "_has_warned", "has_closure",
)  # fmt: skip

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
UNEQUAL_EVALUATIONS = (
    "In one step some workers' optimizers evaluated their closure more often than others, but all must evaluate it equally"
    " often: let the optimizer decide by the closure's return value, which is the mean loss of all workers."
)


class SameRounds:
    """Checks, whenever all workers meet, that they have gone through the same rounds of batches and made as many steps.

    To one worker, a loop that skips a step, for example with `continue` after `backward`, looks like one that accumulates
    gradients. If all workers do the same, both are fine: their steps stay together. If only some do, later meetings combine
    steps of different rounds: under `all-reduce`, which averages as `backward` returns, one worker even leaves out an
    update that all others make. So the next meeting raises an error on all workers. A loop that fetches its own batches has
    no rounds: only its steps count.

    Every worker expects the others to repeat what followed last time after as many meetings within one step, so that
    accumulation causes no exchange. The header that travels with every mean counts the workers whose expectation failed; only
    then all report where they are.

    Vectors that should be equal on all workers (`note`) are compared, too. In the first 10 rounds and then in every 100th,
    the header carries 8 bits of their digest. If the sum shows that another worker's digest differs, all report theirs at the
    next meeting. If the vectors differ by rounding, as between machines
    with different processors, all continue with the first worker's, with one warning; any other difference ends the run.

    Workers also report whether their loops pass a closure to `step`: all must, or none.

    Costs: a pass over memory for each digest; if a worker is surprised, one all-reduce of six numbers per worker.

    Attributes:
        has_closure: whether they pass one, by the last exchange.
        is_evaluating: the workers meet within a step to evaluate closures.
    """

    def __init__(self, replica: Replica, ports: Ports[SharedParameters], replacements: Replacements) -> None:
        self._replica = replica
        self._ports = ports
        self._replacements = replacements
        self._round = self._step = 0  # when they met last
        self._earlier = 0  # step of the meeting before
        self._since = (0, 0)  # rounds and steps from there to the present meeting
        self._followed: dict[int, tuple[int, int]] = {}  # by meetings since the last step
        self._meetings = 0
        self._vectors: Sequence[torch.Tensor] = ()  # of which all workers should have the same
        self._ranges: Ranges | None = None
        self._num_notes = self._equal_at = self._digest = 0
        self._differs = False  # from some other worker, as the last sum of digests says
        self._takes_first = self._has_warned = False
        self.has_closure = self.is_evaluating = False

    @property
    def _compares(self) -> bool:
        """Whether replicas have been compared in one of the last two rounds, as in the first ones."""
        return self._replica.round is not None and self._num_notes <= _FIRST + 1

    def for_newcomers(self, vectors: Sequence[torch.Tensor] = ()) -> dict[str, Any]:
        """What a newcomer needs to be in the same round; from now on, compares replicas as often as in the first rounds.

        Args:
            vectors: which all workers have the same; () if they `note` them before the next mean.
        """
        self._num_notes = self._equal_at = 0
        self._vectors = vectors
        return {name: getattr(self, name) for name in _STATE}

    def enter(self, given: dict[str, Any], vectors: Sequence[torch.Tensor] = ()) -> None:
        """Is in the round of the worker that has `given` this, and has the same `vectors`."""
        vars(self).update(given)
        self._vectors = vectors

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
        self._digest = hash(self._digests()) % Header.num_digests(num_workers) if is_due else 0

    def header(self, *, changed: bool = False) -> Header:
        """What this worker says with the next mean.

        Args:
            changed: whether this worker has something else to report.
        """
        changed |= bool(self._replacements.accept(has_closure=self.has_closure))
        return Header(int(self._surprised() or self._differs or changed), self._digest)

    def heard(self, total: Header) -> bool:
        """Whether any worker has something to report, from the `total` of all headers."""
        self._differs = total.digest != len(self._collectives.members) * self._digest
        if self._digest and not self._differs:
            self._equal_at = self._num_notes
        return total.reports > 0

    def _surprised(self) -> bool:
        """Whether this worker reaches the present meeting in another way than expected."""
        if self._replica.round is None:
            return False
        self._look()
        if self._replica.closure not in (None, self.has_closure):
            return True
        expected = self._followed.get(self._meetings)
        if expected is not None:
            return self._since != expected
        rounds, steps = self._since
        return not steps or rounds not in (0, steps)

    def own_report(self) -> Reports:
        """Where this worker is; the sum over all workers is for `check`."""
        reports = self._report(self._replica.step, self._digests())
        reports.accept(self._replacements.accepted)
        return reports

    def _report(self, step: float, digests: tuple[float, float] = (0.0, 0.0)) -> Reports:
        closure = 0 if self._replica.closure is None else 1 + self._replica.closure
        report = Report(self._replica.round or 0, step, *digests, closure)
        return Reports.of(self._ports.worker_id, report, self._ports.num_workers)

    def _digests(self) -> tuple[float, float]:
        if self._replica.round is None:  # no loop of the user's
            return 0.0, 0.0
        return float(sum(map(_sum_of_words, self._vectors)) % _DIGESTS), float(self._replica.rates)

    def check(self, reports: Reports, since: int | None = None) -> None:
        """Compares all workers' reports; `since`: the last step that all are known to have made.

        Raises:
            UsageError: the workers are at different places (names the workers and the steps they left out), or replicas differ
                by more than rounding.
            NotReplacedError: this worker is a newcomer that differs from the others.
        """
        members = list(self._collectives.members)
        self._replacements.hear(reports, compares=self._compares)
        rounds, steps, digests, rates, closures, _ = reports.rows(members)
        behind = [round_ - step for round_, step in zip(rounds, steps, strict=True)]
        if min(behind) != max(behind) or min(rounds) != max(rounds):
            who = [worker for worker, by in zip(members, behind, strict=True) if by == max(behind)]
            last = int(steps[behind.index(max(behind))])
            raise left_out(who, last, first=min(max(1, (self._step if since is None else since) + 1), last))
        if {1, 2} <= set(closures):
            raise UsageError(
                "In one step, some workers' loops passed step() a closure and others did not: pass one on all "
                "workers, or on none."
            )
        if any(closures):
            self.has_closure = 2 in closures
        check_rates(rates, self._replica.step)
        if len(set(digests)) > 1:
            self._compare()

    def _compare(self) -> None:
        told = torch.zeros(1, dtype=torch.float64)
        for vector in self._vectors:
            ranges = self._ranges if self._ranges is not None else ((0, len(vector)),)
            told += _are_apart(vector, self._of_first(vector), ranges, 1 + self._num_notes - self._equal_at)
        self._add_up(told)
        if told:
            raise UsageError(UNEQUAL_EVALUATIONS if self.is_evaluating else _NOT_ALIKE.format(step=self._replica.step))
        self._takes_first = True  # not now, as a step is under way
        if not self._has_warned and self._ports.worker_id == self._collectives.members[0]:
            self._has_warned = True
            warnings.warn(_ONLY_ROUNDED.format(step=self._replica.step), AlgorithmWarning, stacklevel=2)

    def _of_first(self, vector: torch.Tensor) -> torch.Tensor:
        """The first worker's vector: if that one dies meanwhile, the next one's."""
        while True:
            first = self._collectives.members[0]
            found = self._add_up(vector.clone() if self._ports.worker_id == first else torch.zeros_like(vector))
            if first in self._collectives.members:
                return found

    def _add_up(self, vector: torch.Tensor) -> torch.Tensor:
        self._collectives.start_all_reduce(vector).wait()
        return vector

    @property
    def _collectives(self) -> Collectives:
        assert self._ports.collectives is not None
        return self._ports.collectives

    def met(self) -> None:
        """Ends a meeting at which all workers were where expected, or at the same place."""
        if self._replica.round is not None:
            self._followed[self._meetings] = self._since
            self._meetings = 0 if self._since[1] else self._meetings + 1
            self._earlier = self._step
            self._round, self._step = self._replica.round, self._replica.step

    def meet(self, *, steps: bool = False) -> None:
        """All workers report their place, and whether they step, before operations that would not match elsewhere.

        Raises:
            UsageError: as of `check`.
        """
        if self._replica.round is not None:
            self._look()
            self._gather(self._report(self._replica.step + 0.5 * steps))
            self.met()

    def _gather(self, reports: Reports, since: int | None = None) -> None:
        self._add_up(reports.numbers)
        self.check(reports, since)

    def meet_after(self, total: float) -> None:
        """Ends a meeting with nothing else to report; if the headers' `total` is not as expected, all report where they are.

        Raises:
            UsageError: as of `check`.
        """
        self.tell_if(total)
        self.met()

    def tell_if(self, total: float) -> None:
        """As `meet_after`, for a `total` that arrives later; `met` was called when the headers were sent.

        Raises:
            UsageError: as of `check`.
        """
        if self.heard(Header.unpacked(total, self._ports.num_workers)):
            self._gather(self.own_report(), self._earlier)

    def _look(self) -> None:
        self._since = ((self._replica.round or 0) - self._round, self._replica.step - self._step)


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
    """Compares the workers' digests of learning rates, except for digests of 0.

    Raises:
        UsageError: they differ.
    """
    if len({rate for rate in rates if rate}) > 1:
        raise UsageError(_OTHER_RATES.format(step=step))


def left_out(workers: list[int], step: int, first: int | None = None) -> UsageError:
    """The error for all workers if some have left out `step`, or one of the steps since `first`, that the others make."""
    who = name_workers(workers)
    which = f"step {step}" if first in (None, step) else f"one of steps {first} to {step}"
    return UsageError(
        f"{who[0].upper()}{who[1:]} skipped {which} and went on to another batch, but the others did not, as happens "
        "if a loop runs `continue` or `break` on some workers only: their steps would no longer belong to the same "
        "rounds. Let all workers decide together, for example with worker.sum, or make the step with a loss times 0. "
        "If the workers' own loaders differ in length and the loop steps when its own ends, step after a fixed number "
        "of batches. ad-psgd has no rounds."
    )
