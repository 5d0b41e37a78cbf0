"""The mean gradient of all workers, and which parameters have one: those that have none on any worker make no step."""

from __future__ import annotations

import torch

from paceline.algorithms.same_rounds import SameRounds
from paceline.algorithms.shares import SharesBySpeed
from paceline.errors import UsageError
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import SharedParameters
from paceline.vectors.flat import Ranges

__all__ = ["AgreedGradient"]

# So that the number of those that have something to tell, and of all samples, travel as one, exactly.
_MOST_WORKERS = 2**20

_NOT_ALIKE = (
    "The loops have changed their parameters other than by optimizer.step(), and not all workers alike, where all train the"
    " same ones: change them on every worker, by what all know, or take local-sgd or hogwild."
)


class AgreedGradient:
    """Lets all workers make one update, with the mean, of the parameters that have a gradient on any of them.

    Where one has none on this worker alone, it counts as zero in the mean. Where it has none on any, the optimizer leaves it
    out, as in plain PyTorch: no weight decay, no momentum, no state.

    Every worker remembers what it told the others last, which before the first step is that all parameters have gradients. A
    number travels with each mean and says how many workers would tell something else now; only if it is not 0, all of them
    tell it anew. Whether all come from the same round (`SameRounds`), and with the same parameters where a loop has changed
    its own by itself, is told along with it.

    Costs: nothing as long as the same parameters have gradients; after a change on any worker, one small all-reduce.

    Args:
        replica: this worker's.
        ports: of its program.
        by_speed: whether the workers' batches are as large as they are fast.

    Attributes:
        rounds: where all workers are.
    """

    def __init__(self, replica: Replica, ports: Ports[SharedParameters], *, by_speed: bool = False) -> None:
        assert ports.collectives is not None
        self._replica = replica
        self._ports = ports
        self._collectives = ports.collectives
        self.rounds = SameRounds(replica, ports)
        self._shares = SharesBySpeed(replica, ports) if by_speed and ports.num_workers > 1 else None
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
        is_surprised = self.rounds.surprised()
        return float(is_surprised or self._replica.changed_outside or self._replica.missing != self._told)

    def settle(self, num_changed: float) -> None:
        """Tells the replica what all agree on, after they have told each other anew if so many workers have to.

        Raises:
            UsageError: some have left out a step that others have not; or the loops have changed parameters, and not alike.
        """
        if num_changed:
            ranges, self._told = self._replica.ranges, self._replica.missing
            has = torch.tensor([float(own not in self._told) for own in ranges], dtype=torch.float64)
            digests = torch.zeros(self._ports.num_workers, dtype=torch.float64)
            digests[self._ports.worker_id] = self._digest()
            told = torch.cat([has, digests, self.rounds.told()])
            self._collectives.start_all_reduce(told).wait()
            having, digests, places = told.tensor_split([len(ranges), len(ranges) + len(digests)])
            self.rounds.check(places)
            if len(set(digests.tolist())) > 1:
                raise UsageError(_NOT_ALIKE)
            self._agreed = tuple(own for own, n in zip(ranges, having.tolist(), strict=True) if not n)
        self.rounds.met()
        if self._shares is not None:
            self._shares.meet()
        self._replica.missing = self._agreed

    def _digest(self) -> float:
        if self._replica.round is None:  # no loop of the user's
            return 0.0
        self._replica.changed_outside = False
        return self._replica.digest()
