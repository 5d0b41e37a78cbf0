"""The round in which a lockstep program is: what its members tell each other, and that all are in the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.algorithms.equal_replicas import EqualReplicas, check_rates
from paceline.algorithms.replacements import Replacements
from paceline.algorithms.round_messages import Header, Heard, Report, Reports
from paceline.errors import UsageError, name_workers
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import SharedParameters

_STATE = ("_round", "_step", "_earlier", "_since", "_followed", "_meetings", "has_closure")

UNEQUAL_EVALUATIONS = (
    "In one step some workers' optimizers evaluated their closure more often than others, but all must evaluate it equally"
    " often: let the optimizer decide by the closure's return value, which is the mean loss of all workers."
)


class Round:
    """The round of a program whose workers average vectors.

    With every vector a member sends a `Header`. If any member has something to report, or digests differ, all exchange
    reports. These say in which round of batches and in which step each is, whether its loop passes a closure to `step`, and
    whom the first member accepts as a replacement.

    To one worker, a loop that skips a step, for example with `continue` after `backward`, looks like one that accumulates
    gradients. If all workers do the same, both are fine: their steps stay together. If only some do, later rounds combine
    steps of different batches: under `all-reduce`, which averages as `backward` returns, one worker even leaves out an
    update that all others make. So the next round raises an error on all workers. A loop that fetches its own batches has
    no rounds of batches: only its steps count.

    Every worker expects the others to repeat what followed last time after as many rounds within one step, so that
    accumulation causes no exchange. A worker whose expectation fails has something to report.

    Costs: an exchange of reports is an all-reduce of six numbers per worker.
    """

    def __init__(self, replica: Replica, ports: Ports[SharedParameters], replacements: Replacements) -> None:
        assert ports.collectives is not None
        self._replica = replica
        self._ports = ports
        self._collectives = ports.collectives
        self._replacements = replacements  # whom the first worker accepts
        self.replicas = EqualReplicas(replica, ports)  # compares what should be equal on all workers
        self._round = self._step = 0  # of the last round
        self._earlier = 0  # step of the round before
        self._since = (0, 0)  # batches and steps from the last round to the present one
        self._followed: dict[int, tuple[int, int]] = {}  # by rounds since the last step
        self._meetings = 0
        # is_evaluating: there are rounds within a step to evaluate closures.
        # has_closure: whether loops pass one, by the last exchange.
        self.has_closure = self.is_evaluating = False

    def header(self, *, changed: bool = False, samples: float = 0.0) -> Header:
        """What this worker says with a vector of `samples` samples; `changed`: it has something else to report."""
        changed |= bool(self._replacements.accept(has_closure=self.has_closure))
        return Header(self._surprised() or changed, self.replicas.digest, samples)

    def needs_reports(self, heard: Heard | None) -> bool:
        """Whether all exchange reports; `heard`: what all have said, or None if only time is simulated."""
        if heard is None:
            return False
        if heard.is_equal:
            self.replicas.note_equal()
        return heard.has_report or not heard.is_equal

    def _surprised(self) -> bool:
        """Whether this worker reaches the present round in another way than expected."""
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

    def _look(self) -> None:
        self._since = ((self._replica.round or 0) - self._round, self._replica.step - self._step)

    # Reports

    def own_report(self) -> Reports:
        """Where this worker is; the sum over all workers is for `check`."""
        reports = self._report(self._replica.step, self.replicas.digests())
        reports.accept(self._replacements.accepted)
        return reports

    def _report(self, step: float, digests: tuple[float, float] = (0.0, 0.0)) -> Reports:
        closure = 0 if self._replica.closure is None else 1 + self._replica.closure
        report = Report(self._replica.round or 0, step, *digests, closure)
        return Reports.of(self._ports.worker_id, report, self._ports.num_workers)

    def check(self, reports: Reports, since: int | None = None) -> None:
        """Compares all workers' reports; `since`: the last step that all are known to have made.

        Raises:
            UsageError: the workers are at different places (names the workers and the steps they left out), or replicas differ
                by more than rounding.
            NotReplacedError: this worker is a newcomer that differs from the others.
        """
        members = list(self._collectives.members)
        self._replacements.hear(reports, compares=self.replicas.compares)
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
            self.replicas.compare(UNEQUAL_EVALUATIONS if self.is_evaluating else "")

    def exchange(self, reports: Reports, since: int | None = None) -> None:
        """All members exchange reports; raises the same errors as `check`."""
        self._collectives.start_all_reduce(reports.numbers).wait()
        self.check(reports, since)

    # Its end

    def end(self) -> None:
        """All workers were where expected, or at the same place."""
        if self._replica.round is not None:
            self._followed[self._meetings] = self._since
            self._meetings = 0 if self._since[1] else self._meetings + 1
            self._earlier = self._step
            self._round, self._step = self._replica.round, self._replica.step

    def settle(self, heard: Heard | None, *, is_late: bool = False) -> None:
        """All workers exchange reports if one has something to report.

        `is_late`: `end` had been called when the headers were sent.
        """
        if self.needs_reports(heard):
            self.exchange(self.own_report(), self._earlier if is_late else None)

    def meet(self, *, steps: bool = False) -> None:
        """A round without vectors: all report their place, and whether they step, before operations that would not match."""
        if self._replica.round is not None:
            self._look()
            self.exchange(self._report(self._replica.step + 0.5 * steps))
            self.end()

    # For newcomers

    def for_newcomers(self, vectors: Sequence[torch.Tensor] = ()) -> dict[str, Any]:
        """What a newcomer needs to be in the same round; `vectors` as of `EqualReplicas`."""
        replicas = self.replicas.for_newcomers(vectors)
        return {"replicas": replicas, **{name: getattr(self, name) for name in _STATE}}

    def enter(self, given: dict[str, Any], vectors: Sequence[torch.Tensor] = ()) -> None:
        vars(self).update({name: given[name] for name in _STATE})
        self.replicas.enter(given["replicas"], vectors)


def left_out(workers: list[int], step: int, first: int | None = None) -> UsageError:
    """The error for all workers if some have left out `step`, or one of the steps since `first`, that the others make."""
    who = name_workers(workers)
    which = f"step {step}" if first in (None, step) else f"one of steps {first} to {step}"
    return UsageError(
        f"{who[0].upper()}{who[1:]} skipped {which} and went on to another batch, but the others did not, as happens "
        "if a loop runs `continue` or `break` on some workers only: their steps would no longer belong to the same "
        "rounds. Let all workers decide together, for example with worker.sum, or step with a loss multiplied by 0. "
        "If the workers' own loaders differ in length and the loop steps when its own ends, step after a fixed number "
        "of batches. ad-psgd has no rounds."
    )
