"""The mean gradient of all workers; parameters without a gradient on any worker make no step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.algorithms.replacements import Replacements
from paceline.algorithms.round import Round
from paceline.algorithms.round_messages import Header, Heard, Reports
from paceline.algorithms.shares import SharesBySpeed
from paceline.errors import WorkerLostError
from paceline.optim.ranges import Ranges
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import ReplicatedParameters

_LOST_IN_STEP = (
    "In one of a step's backward passes only workers that have died had batches, and with them the sum of the passes is lost:"
    " resume the run from its last checkpoint."
)


class GradientRound:
    """The round of a program whose workers average gradients, so that all make the same update.

    A gradient missing on this worker only counts as zero in the mean. A parameter without a gradient on any worker is skipped
    by the optimizer, as in plain PyTorch: no weight decay, no momentum, no state.

    Every worker remembers which missing gradients it last reported; before the first step, none. If it has others, it has
    something to report.

    Costs: nothing as long as the same parameters have gradients; after a change on any worker, one small all-reduce.
    """

    def __init__(self, replica: Replica, ports: Ports[ReplicatedParameters], *, by_speed: bool = False) -> None:
        assert ports.collectives is not None
        self._replica = replica
        self._ports = ports
        self._collectives = ports.collectives
        self.replacements = Replacements(replica, ports)  # lets newcomers in
        self.replacements.parts.append(self)
        self.round = Round(replica, ports, self.replacements)  # what all workers tell each other
        self._shares = SharesBySpeed(replica, ports) if by_speed and ports.num_workers > 1 else None
        if self._shares is not None:
            self.replacements.parts.append(self._shares)
        self._told: Ranges | None = ()
        self._agreed: Ranges = ()
        # No worker had a batch in this round, so that no step follows: those that had one have died.
        self.is_void = False
        self._step = 0  # of the last mean
        # The power of two nearest to the last round's mean weight, by which weights are divided. Factors are then near
        # 1, and exactly 1 for the usual batch sizes. A power of two never rounds, so every unit gives the same bits.
        self.unit = 1.0

    def steps(self) -> Iterator[int]:
        """The replica's steps; before each, notes the parameters that must be equal on all workers."""
        x, shards = self._ports.shared.x, self._ports.shards
        equal = [x if shards is None else x[: shards.first]]
        for step in self.replacements.steps():
            self.round.replicas.note(equal, self._replica.ranges)
            yield step

    def average(self) -> None:
        """Replaces the replica's gradient by the mean of all, weighted by samples."""
        replica = self._replica
        numbers = self._collectives.all_reduce_mean(replica.g, replica.samples, self.header(replica.samples).numbers)
        self.end_mean(self.heard_from(numbers), lambda: replica.g)

    def end_mean(self, heard: Heard, mean: Callable[[], torch.Tensor]) -> None:
        """As `end`, for a step with one mean, whose samples are in the headers."""
        samples = round(heard.samples)
        self._replica.round_samples = max(self._replica.round_samples, samples)  # backward passes may have added up
        self.is_void = not samples
        self._agree(heard, mean)

    def header(self, samples: float = 0.0) -> Header:
        """What this worker says with its gradient, which is of so many samples; 0: the weights travel apart."""
        replica = self._replica
        return self.round.header(changed=replica.changed_outside or replica.missing != self._told, samples=samples)

    def heard_from(self, numbers: list[float]) -> Heard:
        """What all have said, from the sums of their headers' numbers."""
        return Heard.of(numbers, len(self._collectives.members))

    def end_pass(self, heard: Heard, mean: Callable[[], torch.Tensor]) -> None:
        """As `end`, for one of a step's passes, whose samples are in the headers."""
        self.end(heard, heard.samples, mean)

    def end(self, heard: Heard | None, samples: float | None, mean: Callable[[], torch.Tensor] | None = None) -> None:
        """Sets the replica's agreed missing gradients; exchanges reports first if any worker has something to report.

        Args:
            heard: what all workers have said; None: only time is simulated.
            samples: that the mean contains; None: unknown.
            mean: returns the mean gradient (P,), if the others continue without dead workers.

        Raises:
            WorkerLostError: the mean contains no sample, and an earlier one of this step is lost with those who had some.
            UsageError: some workers have left out a step, or parameters or learning rates differ.
        """
        self.is_void = samples == 0
        if self.is_void and self._step == self._replica.step:
            raise WorkerLostError(_LOST_IN_STEP)
        self._step = self._replica.step
        if samples:
            self._replica.round_samples += round(samples)
            self.unit = 2.0 ** round(math.log2(samples / self._ports.num_workers))
        self._agree(heard, mean)

    def _agree(self, heard: Heard | None, mean: Callable[[], torch.Tensor] | None) -> None:
        members = self._collectives.members
        has_fewer = len(members) < self.replacements.num_members
        if has_fewer:
            self.replacements.num_members = len(members)
            self._ports.shared.go_on_with(members)
        self._replica.meet(members)
        if self.round.needs_reports(heard) or has_fewer:  # what the dead have reported counts no longer
            ranges, self._told = self._replica.ranges, self._replica.missing
            self._replica.changed_outside = False
            has = torch.tensor([float(own not in self._replica.missing) for own in ranges], dtype=torch.float64)
            told = torch.cat([has, self.round.own_report().numbers])
            self._collectives.start_all_reduce(told).wait()
            having, numbers = told.tensor_split([len(ranges)])
            if mean is not None and len(self._collectives.members) < len(members):  # one died before it reported
                g = mean()
                having += torch.tensor([bool(g[begin:end].any()) for begin, end in ranges])
            self.round.check(Reports(numbers))
            if not self.is_void:  # a GradScaler needs gradients in every step
                self._agreed = tuple(own for own, n in zip(ranges, having.tolist(), strict=True) if not n)
        self.round.end()
        if self._shares is not None:
            self._shares.meet()
        self._replica.missing = self._agreed

    # For newcomers

    def for_newcomers(self) -> dict[str, Any]:
        return {"agreed": self._agreed, "unit": self.unit, "round": self.round.for_newcomers()}

    def enter(self, given: dict[str, Any]) -> None:
        self._agreed, self.unit = given["agreed"], given["unit"]
        self._told = None  # so that it reports in its first round
        self.round.enter(given["round"])
