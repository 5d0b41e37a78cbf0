"""The mean gradient of all workers, and which parameters have one: those that have none on any worker make no step."""

from __future__ import annotations

import torch

from paceline.flat import Ranges
from paceline.transport.base import Collectives
from paceline.transport.replica import Replica

__all__ = ["AgreedGradient"]

# So that the number of those that have something to tell, and of all samples, travel as one, exactly.
_MOST_WORKERS = 2**20


class AgreedGradient:
    """Lets all workers make one update, with the mean, of the parameters that have a gradient on any of them.

    Where one has none on this worker alone, it counts as zero in the mean. Where it has none on any, the optimizer leaves it
    out, as in plain PyTorch: no weight decay, no momentum, no state.

    Every worker remembers what it told the others last, which before the first step is that all parameters have gradients. A
    number travels with each mean and says how many workers would tell something else now; only if it is not 0, all of them
    tell it anew.

    Costs: nothing as long as the same parameters have gradients; after a change on any worker, one small all-reduce.
    """

    def __init__(self, replica: Replica, collectives: Collectives) -> None:
        self._replica = replica
        self._collectives = collectives
        self._told: Ranges = ()
        self._agreed: Ranges = ()

    def average(self, weight: float) -> None:
        """The replica's gradient becomes the mean, weighted by `weight`, of all."""
        replica = self._replica
        number = replica.samples * _MOST_WORKERS + self.changed()
        samples, num_changed = divmod(self._collectives.all_reduce_mean(replica.g, weight, number), _MOST_WORKERS)
        replica.round_samples = max(replica.round_samples, round(samples))  # backward passes may have added up
        self.settle(num_changed)

    def changed(self) -> float:
        """1 if this worker would tell something else than it did last, else 0: to be added up over all workers."""
        return float(self._replica.missing != self._told)

    def settle(self, num_changed: float) -> None:
        """Tells the replica what all agree on, after they have told each other anew if so many workers have to."""
        if num_changed:
            self._told = self._replica.missing
            has = torch.tensor([float(own not in self._told) for own in self._replica.ranges])
            self._collectives.start_all_reduce(has).wait()
            self._agreed = tuple(own for own, n in zip(self._replica.ranges, has.tolist(), strict=True) if not n)
        self._replica.missing = self._agreed
