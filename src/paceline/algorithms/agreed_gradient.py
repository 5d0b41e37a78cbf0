"""The mean gradient of all workers; parameters without a gradient on any worker make no step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from paceline.algorithms.round_messages import Header, Reports
from paceline.algorithms.same_rounds import SameRounds
from paceline.algorithms.shares import SharesBySpeed
from paceline.errors import NotReplacedError
from paceline.optim.flat import Ranges
from paceline.ports.newcomers import Refusal
from paceline.ports.ports import GrowingCollectives, Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import ReplicatedParameters


class AgreedGradient:
    """Averages gradients so that all workers make the same update.

    A gradient missing on this worker only counts as zero in the mean. A parameter without a gradient on any worker is skipped
    by the optimizer, as in plain PyTorch: no weight decay, no momentum, no state.

    Every worker remembers which missing gradients it last reported; before the first step, none. The header that travels
    with each mean counts the workers whose report has changed; if there are any, all exchange reports. `SameRounds` uses the
    same header and exchange for rounds, equal parameters and learning rates.

    Costs: nothing as long as the same parameters have gradients; after a change on any worker, one small all-reduce.

    Args:
        replica: this worker's.
        ports: of its program.
        by_speed: whether batch sizes are proportional to worker speed.

    Attributes:
        rounds: checks that all workers are in the same round.
        unit: by which a program divides weights in backward passes; the same on all workers.
        is_void: no worker had a batch in this round, so that no step follows: those that had one have died.
    """

    def __init__(self, replica: Replica, ports: Ports[ReplicatedParameters], *, by_speed: bool = False) -> None:
        assert ports.collectives is not None
        self._replica = replica
        self._ports = ports
        self._collectives = ports.collectives
        self.rounds = SameRounds(replica, ports)
        self._shares = SharesBySpeed(replica, ports) if by_speed and ports.num_workers > 1 else None
        self._told: Ranges | None = ()
        self._agreed: Ranges = ()
        self._num_members = ports.num_workers
        self.is_void = False
        self.unit = 1.0
        # Newcomers, with their incarnations:
        self._accepted: dict[int, int] = {}  # accepted by this worker, which is the first
        self._newcomers: dict[int, int] = {}  # let in before the next step
        self._come: dict[int, int] = {}  # let in some steps ago, and still compared with the others
        self._scales = False
        self._is_new = ports.incarnation > 0

    def steps(self) -> Iterator[int]:
        """The replica's steps; before each, notes the parameters that must be equal on all workers."""
        x, shards = self._ports.shared.x, self._ports.shards
        equal = [x if shards is None else x[: shards.first]]
        for step in self._replica.steps():
            if self._is_new:
                self._enter(self._replica.given)
            if self._newcomers and self._begins_with_batch:
                self._let_in(self._newcomers)
            self.rounds.note(equal, self._replica.ranges)
            yield step
            self._scales |= self._replica.scaled

    def average(self, weight: float) -> None:
        """Replaces the replica's gradient by the mean of all, weighted by `weight`."""
        replica = self._replica
        num_workers = self._ports.num_workers
        number = self.header()._replace(samples=replica.samples).packed(num_workers)
        total = Header.unpacked(self._collectives.all_reduce_mean(replica.g, weight, number), num_workers)
        replica.round_samples = max(replica.round_samples, total.samples)  # backward passes may have added up
        self.is_void = not total.samples
        self._settle(total, lambda: replica.g)

    def number(self) -> float:
        """This worker's header as a number, whose sum over all workers is exact even in float32."""
        return self.header().packed(self._ports.num_workers)

    def header(self) -> Header:
        """What this worker says with the next mean."""
        replica = self._replica
        has_changed = self._accepts() or replica.changed_outside or replica.missing != self._told
        return self.rounds.header(changed=has_changed)

    def settle(self, total: float, mean: Callable[[], torch.Tensor] | None = None) -> None:
        """Sets the replica's agreed missing gradients; exchanges reports first if any worker has something to report.

        Args:
            total: of the workers' numbers.
            mean: returns the mean gradient (P,), where the others go on without dead workers.

        Raises:
            UsageError: some workers have left out a step, or parameters or learning rates differ.
        """
        self._settle(Header.unpacked(total, self._ports.num_workers), mean)

    def _settle(self, total: Header, mean: Callable[[], torch.Tensor] | None) -> None:
        members = self._collectives.members
        has_fewer = len(members) < self._num_members
        if has_fewer:
            self._num_members = len(members)
            self._ports.shared.go_on_with(members)
        self._replica.meet(members)
        if self.rounds.heard(total) or has_fewer:  # what the dead have reported counts no longer
            ranges, self._told = self._replica.ranges, self._replica.missing
            self._replica.changed_outside = False
            has = torch.tensor([float(own not in self._replica.missing) for own in ranges], dtype=torch.float64)
            come = torch.zeros(self._ports.num_workers, dtype=torch.float64)
            for worker, incarnation in self._accepted.items():
                come[worker] = incarnation
            told = torch.cat([has, come, self.rounds.own_report().numbers])
            self._collectives.start_all_reduce(told).wait()
            having, come, numbers = told.tensor_split([len(ranges), len(ranges) + len(come)])
            reports = Reports(numbers)
            self._newcomers |= {worker: int(n) for worker, n in enumerate(come.tolist()) if n}
            if mean is not None and len(self._collectives.members) < len(members):  # one died before it reported
                g = mean()
                having += torch.tensor([bool(g[begin:end].any()) for begin, end in ranges])
            self._leave_out_unlike(reports)
            self.rounds.check(reports)
            if not self.is_void:  # a GradScaler needs gradients in every step
                self._agreed = tuple(own for own, n in zip(ranges, having.tolist(), strict=True) if not n)
        if not self.rounds.compares:
            self._come = {}
        self.rounds.met()
        if self._shares is not None:
            self._shares.meet()
        self._replica.missing = self._agreed

    # Replacements of dead workers

    def _accepts(self) -> bool:
        """Whether this worker, the first, accepts a newcomer: all hear of it in this round's exchange."""
        port = self._ports.newcomers
        if port is None or self._ports.worker_id != self._collectives.members[0]:
            return False
        deal = self._replica.deal
        self._accepted = port.accepted(deal.epoch if deal is not None else -1)
        if self._accepted and (why := self._why_not()):
            port.refuse(self._accepted, why)
            self._accepted = {}
        return bool(self._accepted)

    @property
    def _begins_with_batch(self) -> bool:
        """Whether the loop has got a batch for the step that begins: it may make several steps with one."""
        deal = self._replica.deal
        return deal is not None and deal.begun > deal.met

    def _why_not(self) -> Refusal | None:
        if self._replica.deal is None:
            return Refusal.OWN_BATCHES
        if self._scales:
            return Refusal.SCALED
        if self.rounds.has_closure:
            return Refusal.CLOSURES
        return None if self._replica.carries_all() else Refusal.SCHEDULES

    def _let_in(self, newcomers: dict[int, int]) -> None:
        """From this step on newcomers take part, with what all workers have now; in it, they have no batch."""
        port, replica = self._ports.newcomers, self._replica
        assert port is not None
        self._newcomers, self._accepted = {}, {}
        first = self._collectives.members[0]
        is_first = self._ports.worker_id == first
        own = replica.for_newcomers() if is_first else {}
        self._come |= newcomers
        self.rounds.compare_anew()
        port.let_in(newcomers, first)
        own["collectives"] = cast(GrowingCollectives, self._collectives).let_in(newcomers)
        members = self._collectives.members
        self._num_members = len(members)
        own["deal"] = replica.let_in(members)
        if is_first:
            program = {"agreed": self._agreed, "unit": self.unit, "rounds": self.rounds.state()}
            port.give(newcomers, {**own, "giver": first, "program": program})

    def _leave_out_unlike(self, reports: Reports) -> None:
        """Leaves out newcomers that do not make the same updates.

        Raises:
            NotReplacedError: this worker is one of them.
        """
        members = self._collectives.members if self._come else ()
        others = [reports[one] for one in members if one not in self._come]
        for one in [*self._come] if others else ():  # else all who could differ from them have died
            if any(reports[one].is_like(other) for other in others):
                continue
            if one == self._ports.worker_id:
                raise NotReplacedError(Refusal.UNLIKE.why)
            del self._come[one]
            reports[one] = reports[self._ports.worker_id]

    def _enter(self, given: dict[str, Any] | None) -> None:
        """Begins a newcomer's first step, with what the first worker gave.

        Raises:
            NotReplacedError: it has not come in, as it does where its loop asks for a batch.
        """
        if given is None:
            raise NotReplacedError(Refusal.OWN_BATCHES.why)
        self._is_new, self._replica.given, program = False, None, given["program"]
        self._agreed, self.unit, self._num_members = program["agreed"], program["unit"], len(self._collectives.members)
        self._told = None  # so that it reports in its first round
        self.rounds.enter(program["rounds"])
        self._come = {self._ports.worker_id: self._ports.incarnation}
