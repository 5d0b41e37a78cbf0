"""The modes of a parameter server: when gradients become updates, and when workers may go on.

All in which modes differ is asked of them here: a shard is given an `Admission`, a worker whether all shards are in step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from paceline.algorithms.server.admission import Admission, AutoQuorum, Clocks, Follower, Quorum, Recent, WeightByTime
from paceline.algorithms.server.gathering import Gathering, Metered, NoGathering, Pool, WorkerTable
from paceline.algorithms.server.noise import NoiseMeter
from paceline.errors import UsageError
from paceline.planner.backup_times import PUBLISHED_HALF_EFFICIENT
from paceline.specs.bounds import COUNT, COUNT_FROM_0
from paceline.specs.types import check_fields

__all__ = ["Async", "Bounded", "Mode", "Rennala", "Ringleader", "Ringmaster", "Sync"]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """When a parameter server makes updates of the gradients that come, and when their workers may go on."""

    #: Whether several workers' gradients make one update: they then share its version, and none is stale.
    together: ClassVar[bool] = False
    #: Whether one server alone can decide what becomes of a gradient, by what has come to it before.
    one_server: ClassVar[bool] = False
    #: Whether the last worker to leave lets gradients that wait at the server make an update.
    ends_with_update: ClassVar[bool] = False
    #: Whether a worker may wait for another one's gradient.
    waits: ClassVar[bool] = False

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

    def gathering(self, num_workers: int) -> Gathering:
        """Where gradients are gathered, of which an update has several of one worker."""
        return NoGathering()

    def parts(self, num_workers: int) -> tuple[Callable[[int], Admission], Gathering]:
        """What decides, by shard, and where gradients are gathered; the two may know of each other."""
        return lambda shard_id: self.admission(shard_id, num_workers), self.gathering(num_workers)

    @property
    def follows_times(self) -> bool:
        """Whether gradients are weighted by the workers' times, which a second copy of the shard does not see."""
        return False

    def check_shards(self, num_shards: int) -> None:
        """Refuses what cannot be with so many shards."""
        if self.one_server and num_shards > 1:
            name = type(self).__name__.lower()
            raise UsageError(
                f"mode={name} goes by the order in which gradients come, which differs from shard to shard: take shards=1."
            )

    def check_copies(self) -> None:
        """Refuses a second copy of a shard where it could not make the same updates."""
        if self.one_server or self.follows_times:
            raise UsageError(
                "The second copy of a shard hears of updates, not of what they were made from: leave out durability=replica,"
                " or take sync, bounded, or async without a rate."
            )

    def check_workers(self, num_workers: int) -> None:
        """Refuses a number of workers, 2 or more, that the mode cannot run with."""


@dataclass(frozen=True, kw_only=True)
class Sync(Mode):
    """One update of the first N = workers - backups gradients of every step; those that come later are dropped.

    With backups this is m-synchronous SGD, m = N: waiting for the fastest m of n, which is optimal in time up to logarithms
    where times are random (Begunov and Tyurin), so long as all workers draw from the same data.

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
        rate: `linear` multiplies the learning rate by the number of gradients in an update, which stands for as many updates:
            weight decay grows with it, and any optimizer has it.

    Reference: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981, Algorithms 3 and 4. There, every
        shard chooses for itself, and means are unweighted; here they are weighted by samples. Begunov and Tyurin, 2026,
        arXiv:2602.03802, for m-synchronous SGD.
    """

    backups: Annotated[int, COUNT_FROM_0] | Literal["auto"] = 0
    quorum: Literal["global", "per-shard"] = "global"
    rate: Literal["none", "linear"] = "none"

    together: ClassVar[bool] = True
    waits: ClassVar[bool] = True

    @property
    def note(self) -> str:
        if self.backups != "auto":
            return ""
        return (
            f"backups=auto takes steps to go as 1 + {PUBLISHED_HALF_EFFICIENT:.0f} / N with N gradients each, as published for"
            " Inception, whatever is trained; paceline plan backups RUN --half-efficient chooses by another number."
        )

    @property
    def chosen_once(self) -> bool:
        return self.quorum == "global"

    @property
    def scales_rate(self) -> bool:
        return self.rate == "linear"

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        workers = range(num_workers)
        if shard_id and self.chosen_once:
            return Follower(num_workers, workers)
        return AutoQuorum(workers) if self.backups == "auto" else Quorum(num_workers - self.backups, workers)

    def check_shards(self, num_shards: int) -> None:
        super().check_shards(num_shards)
        if self.backups == "auto" and not self.chosen_once and num_shards > 1:
            raise UsageError("backups=auto is chosen once for all shards: leave out quorum=per-shard.")

    def check_workers(self, num_workers: int) -> None:
        if self.backups != "auto" and self.backups >= num_workers:
            raise UsageError(
                f"Of {num_workers} workers at most {num_workers - 1} can be backups, not {self.backups}: start more workers."
            )


@dataclass(frozen=True, kw_only=True)
class Async(Mode):
    """Every gradient is an update as it comes, and nobody waits.

    Use when: workers are unequally fast, and every gradient should count.
    When N doubles: staleness does, too: lower the learning rate.

    Args:
        rate: `rescaled` makes a worker's gradients as much longer as they take longer, by the server's measurements, so
            that all workers' data count alike: for parts of the data that differ (`skewed`, `fixed`), where plain `async`
            trains for the fastest workers' data. The mean factor is 1. One that is k times slower than all others has steps up
            to k times as long: keep the learning rate times k below what is stable. Momentum keeps each gradient's factor,
            weight decay has none. Adam and the like, whose steps do not follow a gradient's length, are refused.

    Reference: Chen et al., 2016, arXiv:1604.00981, Algorithms 1 and 2; for `rescaled` "Rescaled Asynchronous SGD", 2026,
        arXiv:2605.13434.
    """

    rate: Literal["none", "rescaled"] = "none"

    @property
    def follows_times(self) -> bool:
        return self.rate == "rescaled"

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        return WeightByTime() if self.follows_times else Admission()


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

    waits: ClassVar[bool] = True

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        return Clocks(self.clock_bound, range(num_workers))


@dataclass(frozen=True, kw_only=True)
class Ringmaster(Mode):
    """Every gradient is an update as it comes, if it is not too late; else it is dropped, and its worker goes on.

    Use when: some workers are many times slower than others, and the step is large: their late gradients would undo it.
    Not: `bounded`, where the fast wait for the slow, and nothing is lost.

    Args:
        threshold: R; a gradient counts that is fewer than R updates late. None: the number of workers: equally fast ones lose
            nothing. A large one is `async`; 1 takes gradients of the newest parameters only. `auto` begins with the number of
            workers, and rises, up to 64 times that, to the number of gradients in whose mean noise and gradient are equal, as
            the server measures it; the learning rate does not follow. The result's `chosen_gradients` has it.

    Reference: Maranjyan, Tyurin and Richtárik, "Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity",
        ICML 2025, arXiv:2501.16168. There R follows from the gradients' noise and the accuracy that is wanted; `auto` takes
        the gradient's own norm of the moment for the latter, and is never below the number of workers, which is our own. A
        gradient that is too late already is not stopped here, but finished and dropped.
    """

    threshold: Annotated[int, COUNT] | Literal["auto"] | None = None

    one_server: ClassVar[bool] = True

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        return Recent(_number(self.threshold, num_workers))

    def parts(self, num_workers: int) -> tuple[Callable[[int], Admission], Gathering]:
        """What is applied is measured, where the threshold follows from it."""
        threshold = _number(self.threshold, num_workers)
        if isinstance(threshold, int):
            return super().parts(num_workers)
        return lambda _: Recent(threshold), Metered(threshold)


@dataclass(frozen=True, kw_only=True)
class Rennala(Mode):
    """One update of every B gradients of the current parameters, from whoever; those of earlier parameters are dropped.

    A worker whose gradient counts goes on at once with the parameters that it has: a fast one gives several, a slow one
    perhaps none. So a step takes B over the sum of the workers' speeds, whoever is slow. What is under way when a step ends is
    lost, up to n - 1 gradients: with a B of n nearly half of all, with 8 n a ninth.

    Use when: results must be those of a batch of B gradients, and workers are of any speeds.
    When N doubles: nothing but the time; a larger B makes fewer, larger steps.
    Not: `sync(backups=b)`, which takes one gradient from each of the fastest: a fast worker waits there, and less is lost.

    Args:
        gradients: B. None: the number of workers. `auto` begins with that, and rises, up to 64 times that, to the number in
            whose mean noise and gradient are equal, as the server measures it. The learning rate does not follow. The result's
            `chosen_gradients` has the number.

    Reference: Tyurin and Richtárik, "Optimal Time Complexities of Parallel Stochastic Optimization Methods Under a Fixed
        Computation Model", NeurIPS 2023, arXiv:2305.12387. There B follows from the gradients' noise and the accuracy that is
        wanted; `auto` takes the gradient's own norm of the moment for the latter, and is never below the number of workers,
        which is our own. Here means are weighted by samples.
    """

    gradients: Annotated[int, COUNT] | Literal["auto"] | None = None

    together: ClassVar[bool] = True
    one_server: ClassVar[bool] = True
    ends_with_update: ClassVar[bool] = True

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        return Recent(1)

    def gathering(self, num_workers: int) -> Gathering:
        return Pool(_number(self.gradients, num_workers), range(num_workers))


@dataclass(frozen=True, kw_only=True)
class Ringleader(Mode):
    """Every update is the mean of all workers' means: of the gradients that each has brought in this round.

    A round begins once every worker has brought a gradient; then each makes one update with its next one. So the slowest
    worker's data count as much as the fastest one's, no gradient is lost, and none is more than 2 n - 2 updates late.

    Costs: up to two vectors per worker at the server, and a mean over them at every update.
    Use when: workers have data of their own that differ (`skewed`, `fixed`), and are unequally fast.
    When N doubles: so do the updates of a round, and how late gradients are: lower the learning rate.
    Not: `async`, which trains for the fastest workers' data; `sync`, where the fast wait.

    Reference: Maranjyan and Richtárik, "Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under Data
        Heterogeneity", 2025, arXiv:2509.22860. Here a worker's mean is weighted by samples.
    """

    one_server: ClassVar[bool] = True
    ends_with_update: ClassVar[bool] = True

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        return Admission()

    def gathering(self, num_workers: int) -> Gathering:
        return WorkerTable(range(num_workers))


def _number(asked: int | Literal["auto"] | None, num_workers: int) -> int | NoiseMeter:
    """A number of gradients, or what measures it."""
    if asked == "auto":
        return NoiseMeter(num_workers)
    return num_workers if asked is None else asked
