"""The mean gradient of all workers, and which parameters have one: those that have none on any worker make no step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paceline.algorithms.same_rounds import EXACT, SameRounds
from paceline.algorithms.shares import SharesBySpeed
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import ReplicatedParameters
from paceline.vectors.flat import Ranges

__all__ = ["AgreedGradient"]


class AgreedGradient:
    """Lets all workers make one update, with the mean, of the parameters that have a gradient on any of them.

    Where one has none on this worker alone, it counts as zero in the mean. Where it has none on any, the optimizer leaves it
    out, as in plain PyTorch: no weight decay, no momentum, no state.

    Every worker remembers what it told the others last, which before the first step is that all parameters have gradients. A
    number travels with each mean and says how many workers would tell something else now; only if it is not 0, all of them
    tell each other. `SameRounds` uses the same number and exchange for rounds, equal parameters and learning rates.

    Costs: nothing as long as the same parameters have gradients; after a change on any worker, one small all-reduce.

    Args:
        replica: this worker's.
        ports: of its program.
        by_speed: whether the workers' batches are as large as they are fast.

    Attributes:
        rounds: where all workers are.
    """

    def __init__(self, replica: Replica, ports: Ports[ReplicatedParameters], *, by_speed: bool = False) -> None:
        assert ports.collectives is not None
        self._replica = replica
        self._ports = ports
        self._collectives = ports.collectives
        self.rounds = SameRounds(replica, ports)
        self._shares = SharesBySpeed(replica, ports) if by_speed and ports.num_workers > 1 else None
        self._told: Ranges = ()
        self._agreed: Ranges = ()

    def steps(self) -> Iterator[int]:
        """The replica's steps; before each, notes the parameters that all workers should have alike."""
        x, shards = self._ports.shared.x, self._ports.shards
        equal = [x if shards is None else x[: shards.first]]
        for step in self._replica.steps():
            self.rounds.note(equal, self._replica.ranges)
            yield step

    def average(self, weight: float) -> None:
        """The replica's gradient becomes the mean, weighted by `weight`, of all."""
        replica = self._replica
        number = replica.samples * EXACT + self.number()
        samples, rest = divmod(self._collectives.all_reduce_mean(replica.g, weight, number), EXACT)
        replica.round_samples = max(replica.round_samples, round(samples))  # backward passes may have added up
        self.settle(rest)

    def number(self) -> float:
        """This worker's number, whose sum over all workers is exact in float32, too."""
        replica = self._replica
        has_changed = replica.changed_outside or replica.missing != self._told
        return self.rounds.number(changed=has_changed)

    def settle(self, total: float) -> None:
        """Gives the replica what all workers agree on; they first exchange it if the `total` of their numbers says so.

        Raises:
            UsageError: some workers have left out a step, or parameters or learning rates differ.
        """
        if self.rounds.heard(total):
            ranges, self._told = self._replica.ranges, self._replica.missing
            self._replica.changed_outside = False
            has = torch.tensor([float(own not in self._told) for own in ranges], dtype=torch.float64)
            told = torch.cat([has, self.rounds.told()])
            self._collectives.start_all_reduce(told).wait()
            having, places = told.tensor_split([len(ranges)])
            self.rounds.check(places)
            self._agreed = tuple(own for own, n in zip(ranges, having.tolist(), strict=True) if not n)
        self.rounds.met()
        if self._shares is not None:
            self._shares.meet()
        self._replica.missing = self._agreed
