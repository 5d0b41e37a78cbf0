"""The mean gradient of all workers; parameters without a gradient on any worker make no step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.algorithms.replacements import Replacements
from paceline.algorithms.round_messages import Header, Reports
from paceline.algorithms.same_rounds import SameRounds
from paceline.algorithms.shares import SharesBySpeed
from paceline.errors import WorkerLostError
from paceline.optim.flat import Ranges
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import ReplicatedParameters

_LOST_IN_STEP = (
    "In one of a step's backward passes only workers that have died had batches, and with them the sum of the passes is lost:"
    " resume the run from its last checkpoint."
)


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
        replacements: lets newcomers in.
        rounds: checks that all workers are in the same round.
        unit: by which a program divides weights in backward passes; the same on all workers.
        is_void: no worker had a batch in this round, so that no step follows: those that had one have died.
    """

    def __init__(self, replica: Replica, ports: Ports[ReplicatedParameters], *, by_speed: bool = False) -> None:
        assert ports.collectives is not None
        self._replica = replica
        self._ports = ports
        self._collectives = ports.collectives
        self.replacements = Replacements(replica, ports)
        self.replacements.parts.append(self)
        self.rounds = SameRounds(replica, ports, self.replacements)
        self._shares = SharesBySpeed(replica, ports) if by_speed and ports.num_workers > 1 else None
        if self._shares is not None:
            self.replacements.parts.append(self._shares)
        self._told: Ranges | None = ()
        self._agreed: Ranges = ()
        self.is_void = False
        self._step = 0  # of the last mean
        self.unit = 1.0

    def steps(self) -> Iterator[int]:
        """The replica's steps; before each, notes the parameters that must be equal on all workers."""
        x, shards = self._ports.shared.x, self._ports.shards
        equal = [x if shards is None else x[: shards.first]]
        for step in self.replacements.steps():
            self.rounds.note(equal, self._replica.ranges)
            yield step

    def average(self, weight: float) -> None:
        """Replaces the replica's gradient by the mean of all, weighted by `weight`."""
        replica = self._replica
        num_workers = self._ports.num_workers
        number = self.header()._replace(samples=replica.samples).packed(num_workers)
        total = Header.unpacked(self._collectives.all_reduce_mean(replica.g, weight, number), num_workers)
        replica.round_samples = max(replica.round_samples, total.samples)  # backward passes may have added up
        self.is_void = not total.samples
        self._settle(total, lambda: replica.g)

    def note_samples(self, number: float | None) -> None:
        """Notes how many samples a mean contains; None: only time is simulated.

        Raises:
            WorkerLostError: none, and an earlier mean of this step is lost with them.
        """
        self.is_void = number == 0
        if self.is_void and self._step == self._replica.step:
            raise WorkerLostError(_LOST_IN_STEP)
        self._step = self._replica.step

    def number(self) -> float:
        """This worker's header as a number, whose sum over all workers is exact even in float32."""
        return self.header().packed(self._ports.num_workers)

    def header(self) -> Header:
        """What this worker says with the next mean."""
        replica = self._replica
        return self.rounds.header(changed=replica.changed_outside or replica.missing != self._told)

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
        has_fewer = len(members) < self.replacements.num_members
        if has_fewer:
            self.replacements.num_members = len(members)
            self._ports.shared.go_on_with(members)
        self._replica.meet(members)
        if self.rounds.heard(total) or has_fewer:  # what the dead have reported counts no longer
            ranges, self._told = self._replica.ranges, self._replica.missing
            self._replica.changed_outside = False
            has = torch.tensor([float(own not in self._replica.missing) for own in ranges], dtype=torch.float64)
            told = torch.cat([has, self.rounds.own_report().numbers])
            self._collectives.start_all_reduce(told).wait()
            having, numbers = told.tensor_split([len(ranges)])
            if mean is not None and len(self._collectives.members) < len(members):  # one died before it reported
                g = mean()
                having += torch.tensor([bool(g[begin:end].any()) for begin, end in ranges])
            self.rounds.check(Reports(numbers))
            if not self.is_void:  # a GradScaler needs gradients in every step
                self._agreed = tuple(own for own, n in zip(ranges, having.tolist(), strict=True) if not n)
        self.rounds.met()
        if self._shares is not None:
            self._shares.meet()
        self._replica.missing = self._agreed

    # For newcomers

    def for_newcomers(self) -> dict[str, Any]:
        """As of `Part`."""
        return {"agreed": self._agreed, "unit": self.unit, "rounds": self.rounds.for_newcomers()}

    def enter(self, given: dict[str, Any]) -> None:
        """As of `Part`."""
        self._agreed, self.unit = given["agreed"], given["unit"]
        self._told = None  # so that it reports in its first round
        self.rounds.enter(given["rounds"])
