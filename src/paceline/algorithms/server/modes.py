"""The modes of a parameter server: when gradients become updates, and when workers may go on.

All in which modes differ is asked of them here: a shard is given an `Admission`, a worker whether all shards are in step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from paceline.algorithms.server.admission import Admission, AutoQuorum, Clocks, Follower, Quorum
from paceline.errors import UsageError
from paceline.planner.backup_times import PUBLISHED_HALF_EFFICIENT
from paceline.specs.bounds import COUNT_FROM_0
from paceline.specs.types import check_fields

__all__ = ["Async", "Bounded", "Mode", "Sync"]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """When a parameter server makes updates of the gradients that come, and when their workers may go on."""

    #: Whether several workers' gradients make one update: they then share its version, and none is stale.
    together: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def note(self) -> str:
        """A sentence for the run's result on what the mode takes for granted; or empty."""
        return ""

    @property
    def chosen_once(self) -> bool:
        """Whether shard 0 chooses for all shards whose gradients make a step; all are then of one version to a worker."""
        return False

    @property
    def scales_rate(self) -> bool:
        """Whether the learning rate is multiplied by the number of gradients in an update."""
        return False

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        """What decides for one shard."""
        raise TypeError(f"{type(self).__name__} must say what it admits")

    def check_shards(self, num_shards: int) -> None:
        """Refuses what cannot be with so many shards.

        Raises:
            UsageError: with the reason and the remedy.
        """

    def check_workers(self, num_workers: int) -> None:
        """Refuses a number of workers, 2 or more, that the mode cannot run with.

        Raises:
            UsageError: with the reason and the remedy.
        """


@dataclass(frozen=True, kw_only=True)
class Sync(Mode):
    """One update of the first N = workers - backups gradients of every step; those that come later are dropped.

    Use when: results must be those of large batches, and up to `backups` slow or dead workers shall delay nobody.
    When N doubles: half as many updates of twice the batch: see `rate`.

    Args:
        backups: b, workers whose gradients a step can do without. `auto` begins with 0 and chooses again every 20 steps, up to
            a quarter of the workers (or 1), what takes the least time to converge by the round trips that the first shard has
            seen; a worker that stops is waited for until a b above 0 is chosen. What a gradient is worth is not measured:
            steps are taken to go as 1 + 411 / N, as published for Inception; small models on small data have less noise
            than that, so that fewer gradients cost less, and more backups would be best.
        quorum: whose gradients make a step is chosen once for all shards, or by each shard for itself, as in the paper; then
            an update may be of different gradients in different shards.
        rate: `linear` multiplies the learning rate by the number of gradients in an update.

    Reference: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981, Algorithms 3 and 4. There, every
        shard chooses for itself, and means are unweighted; here they are weighted by samples.
    """

    backups: Annotated[int, COUNT_FROM_0] | Literal["auto"] = 0
    quorum: Literal["global", "per-shard"] = "global"
    rate: Literal["none", "linear"] = "none"

    together: ClassVar[bool] = True

    @property
    def note(self) -> str:
        """By which measure backups are chosen."""
        if self.backups != "auto":
            return ""
        return (
            f"backups=auto takes steps to go as 1 + {PUBLISHED_HALF_EFFICIENT:.0f} / N with N gradients each, as published for"
            " Inception, whatever is trained; paceline plan backups RUN --half-efficient chooses by another number."
        )

    @property
    def chosen_once(self) -> bool:
        """Where the quorum is global."""
        return self.quorum == "global"

    @property
    def scales_rate(self) -> bool:
        """Where the rate is linear."""
        return self.rate == "linear"

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        """A quorum, or what follows shard 0's."""
        workers = range(num_workers)
        if shard_id and self.chosen_once:
            return Follower(num_workers, workers)
        return AutoQuorum(workers) if self.backups == "auto" else Quorum(num_workers - self.backups, workers)

    def check_shards(self, num_shards: int) -> None:
        """Refuses a number of backups that every shard would choose for itself."""
        if self.backups == "auto" and not self.chosen_once and num_shards > 1:
            raise UsageError("backups=auto is chosen once for all shards: leave out quorum=per-shard.")

    def check_workers(self, num_workers: int) -> None:
        """Refuses as many backups as there are workers."""
        if self.backups != "auto" and self.backups >= num_workers:
            raise UsageError(
                f"Of {num_workers} workers at most {num_workers - 1} can be backups, not {self.backups}: start more workers."
            )


@dataclass(frozen=True, kw_only=True)
class Async(Mode):
    """Every gradient is an update as it comes, and nobody waits.

    Use when: workers are unequally fast, and every gradient should count.
    When N doubles: staleness does, too: lower the learning rate.

    Reference: Chen et al., 2016, arXiv:1604.00981, Algorithms 1 and 2.
    """

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        """The plainest."""
        return Admission()


@dataclass(frozen=True, kw_only=True)
class Bounded(Mode):
    """Every gradient is an update as it comes, but no worker begins a step while it is too far ahead of the slowest.

    What a worker reads when it has made c updates has all updates of all workers up to their (c - s)-th, at every shard.

    Use when: every gradient should count, and none be very stale.

    Args:
        clock_bound: s, steps; 0 is as good as a barrier. It bounds clocks: with n workers a gradient may be
            (2 s + 1) (n - 1) versions stale.

    Reference: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
    """

    clock_bound: Annotated[int, COUNT_FROM_0]

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        """Clocks, at every shard."""
        return Clocks(self.clock_bound, range(num_workers))
