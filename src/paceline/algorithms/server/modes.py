"""The modes of a parameter server: when gradients become updates, and when workers can continue.

A mode gives each shard an `Admission`, and tells workers whether all shards are in step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from paceline.algorithms.server.admission import Admission, AutoQuorum, Clocks, Follower, Quorum, Recent, WeightByTime
from paceline.algorithms.server.gathering import Gathering, Pool, WorkerTable
from paceline.algorithms.server.noise import NoiseMeter
from paceline.errors import UsageError
from paceline.planner.backup_times import PUBLISHED_HALF_EFFICIENT
from paceline.specs.bounds import COUNT, COUNT_FROM_0
from paceline.specs.types import check_fields


@dataclass(frozen=True, kw_only=True)
class Mode:
    """When a parameter server turns gradients into updates, and when workers can continue."""

    #: Whether several workers' gradients make one update: they then share its version, and none is stale.
    together: ClassVar[bool] = False
    #: Whether decisions depend on the order in which gradients arrive, which takes a single server.
    one_server: ClassVar[bool] = False
    #: Whether gradients waiting at the server make an update when the last worker leaves.
    ends_with_update: ClassVar[bool] = False
    #: Whether a worker may wait for another one's gradient.
    waits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def note(self) -> str:
        """A sentence about the mode's assumptions for the run's result; empty if there is none."""
        return ""

    def without_slowest(self, num_workers: int) -> Mode:
        """A mode that does not wait for one slow worker."""
        return Async()

    @property
    def unrecorded(self) -> str:
        """As `Algorithm.unrecorded`, of the decisions on gradients."""
        return "the order in which gradients waited" if self.ends_with_update else ""

    @property
    def chosen_once(self) -> bool:
        """Whether shard 0 chooses for all shards whose gradients make a step; a worker then reads one version from all."""
        return False

    @property
    def scales_rate(self) -> bool:
        """Whether the learning rate is multiplied by the number of gradients in an update."""
        return False

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        """The rule of one shard."""
        raise TypeError(f"{type(self).__name__} must say what it admits")

    def gathering(self, num_workers: int) -> Gathering:
        """Gathers gradients if an update can include several of one worker."""
        return Gathering()

    def parts(self, num_workers: int) -> tuple[Callable[[int], Admission], Gathering]:
        """The admission by shard, and the gathering; the two may share state."""
        return lambda shard_id: self.admission(shard_id, num_workers), self.gathering(num_workers)

    @property
    def follows_times(self) -> bool:
        """Whether gradients are weighted by the workers' times, which a second copy of the shard cannot see."""
        return False

    def check_shards(self, num_shards: int) -> None:
        """Refuses a number of shards that the mode cannot run with."""
        if self.one_server and num_shards > 1:
            name = type(self).__name__.lower()
            raise UsageError(
                f"mode={name} depends on the order in which gradients arrive, which differs from shard to shard: use "
                "shards=1."
            )

    def check_copies(self) -> None:
        """Refuses a second copy of a shard if it could not make the same updates."""
        if self.one_server or self.follows_times:
            raise UsageError(
                "The second copy of a shard receives updates, but not the gradients behind them: leave out "
                "durability=replica, or use sync, bounded, or async without a rate."
            )

    def check_workers(self, num_workers: int) -> None:
        """Refuses a number of workers, 2 or more, that the mode cannot run with."""


@dataclass(frozen=True, kw_only=True)
class Sync(Mode):
    """One update of the first N = workers - backups gradients of every step; later ones are dropped.

    With backups this is m-synchronous SGD, m = N: it waits for the fastest m of n, which is time-optimal up to logarithms for
    random times (Begunov and Tyurin), as long as all workers draw from the same data.

    Use when: results must be those of large batches, and up to `backups` slow or dead workers must not delay a step.
    When N doubles: half as many updates of twice the batch: see `rate`.

    Args:
        backups: b, workers whose gradients a step can do without. `auto` begins with 0 and chooses again every 20 steps, up to
            a quarter of the workers (or 1), the b that converges in the least time by the round trips that the first shard has
            measured; a worker that stops delays steps until a b above 0 is chosen. The value of a gradient is not measured:
            `auto` assumes that the number of steps goes as 1 + 411 / N, as published for Inception. Small models on small data
            have less noise, so that fewer gradients cost less, and more backups would be best.
        quorum: choose whose gradients make a step once for all shards (`global`), or in each shard, as in the paper
            (`per-shard`); then an update can contain different gradients in different shards.
        rate: `linear` multiplies the learning rate by the number of gradients in an update, for any optimizer; weight decay
            grows with it.

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
            f"backups=auto assumes for every model that steps go as 1 + {PUBLISHED_HALF_EFFICIENT:.0f} / N with N gradients"
            " each, as published for Inception; paceline plan backups RUN --half-efficient uses another number."
        )

    def without_slowest(self, num_workers: int) -> Mode:
        """With one more backup worker, if each step still takes two gradients."""
        if self.backups == "auto" or self.backups + 2 >= num_workers:
            return super().without_slowest(num_workers)
        return replace(self, backups=self.backups + 1)

    @property
    def unrecorded(self) -> str:
        return "the times that the number of backup workers followed" if self.backups == "auto" else ""

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
                f"With {num_workers} workers, at most {num_workers - 1} can be backups, not {self.backups}: start more "
                "workers."
            )


@dataclass(frozen=True, kw_only=True)
class Async(Mode):
    """Every gradient becomes an update as it arrives, without waiting.

    Use when: workers are unequally fast, and every gradient should count.
    When N doubles: staleness doubles, too: lower the learning rate.

    Args:
        rate: `rescaled` scales a worker's gradients in proportion to its measured time per gradient, so that all workers' data
            count alike: for workers with different data (`skewed`, `fixed`), where plain `async` favours the fastest workers'
            data. The mean factor is 1. A worker that is k times slower than all others takes steps up to k times as long: keep
            the learning rate times k below what is stable. Momentum keeps each gradient's factor; weight decay is not scaled.
            Optimizers such as Adam, whose steps do not scale with the gradient, are refused.

    Reference: Chen et al., 2016, arXiv:1604.00981, Algorithms 1 and 2; for `rescaled` "Rescaled Asynchronous SGD", 2026,
        arXiv:2605.13434.
    """

    rate: Literal["none", "rescaled"] = "none"

    @property
    def unrecorded(self) -> str:
        return "the times that gradients' weights followed" if self.follows_times else ""

    @property
    def follows_times(self) -> bool:
        return self.rate == "rescaled"

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        return WeightByTime() if self.follows_times else Admission()


@dataclass(frozen=True, kw_only=True)
class Bounded(Mode):
    """Every gradient becomes an update as it arrives, but no worker begins a step while it is too far ahead of the slowest.

    The parameters that a worker reads after c updates include all updates of all workers up to their (c - s)-th, at every
    shard.

    Use when: every gradient should count, and none should be very stale.

    Args:
        clock_bound: s, steps; 0 acts as a barrier. It bounds clocks: with n workers a gradient may be (2 s + 1) (n - 1)
            versions stale.

    Reference: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
    """

    clock_bound: Annotated[int, COUNT_FROM_0]

    waits: ClassVar[bool] = True

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        return Clocks(self.clock_bound, range(num_workers))


@dataclass(frozen=True, kw_only=True)
class Ringmaster(Mode):
    """Every gradient becomes an update as it arrives unless it is too late; a late one is dropped, and its worker continues.

    Use when: some workers are many times slower than others, and the step is large: their late gradients would undo it.
    Not: `bounded`, where fast workers wait for slow ones and nothing is lost.

    Args:
        threshold: R; a gradient counts if it is fewer than R updates late. None: the number of workers, with
            which equally fast workers lose no gradient. A large R is `async`; 1 takes only gradients of the newest
            parameters. `auto` begins with the number of workers and rises to the gradient noise scale that the server
            measures, but to at most 64 times the number of workers; the learning rate does not change with it. The result
            has the threshold as `chosen_gradients`.

    Reference: Maranjyan, Tyurin and Richtárik, "Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity",
        ICML 2025, arXiv:2501.16168. There R follows from the gradients' noise and the target accuracy; our `auto` replaces the
        latter by the current gradient norm, and is never below the number of workers. A gradient that is already too late is
        not stopped here, but finished and dropped.
    """

    threshold: Annotated[int, COUNT] | Literal["auto"] | None = None

    one_server: ClassVar[bool] = True

    def admission(self, shard_id: int, num_workers: int) -> Admission:
        return Recent(_number(self.threshold, num_workers))

    def parts(self, num_workers: int) -> tuple[Callable[[int], Admission], Gathering]:
        """With `auto`, measures the noise of the applied gradients."""
        threshold = _number(self.threshold, num_workers)
        if isinstance(threshold, int):
            return super().parts(num_workers)
        return lambda _: Recent(threshold), Gathering(threshold)


@dataclass(frozen=True, kw_only=True)
class Rennala(Mode):
    """One update of every B gradients of the current parameters, from any workers; those of earlier parameters are dropped.

    A worker whose gradient counts continues at once with its current parameters: a fast one contributes several, a slow one
    perhaps none. So a step takes B over the sum of the workers' speeds, however unequal they are. Gradients under way when
    a step ends are lost, up to n - 1: with B = n nearly half of all, with 8 n a ninth.

    Use when: results must be those of a batch of B gradients, and workers have any speeds.
    When N doubles: only the time changes; a larger B makes fewer, larger steps.
    Not: `sync(backups=b)`, which takes one gradient from each of the fastest: a fast worker waits there, and less is lost.

    Args:
        gradients: B. None: the number of workers. `auto` begins with that and rises to the gradient noise scale that the
            server measures, but to at most 64 times the number of workers. The learning rate does not change with it. The
            result has the number as `chosen_gradients`.

    Reference: Tyurin and Richtárik, "Optimal Time Complexities of Parallel Stochastic Optimization Methods Under a Fixed
        Computation Model", NeurIPS 2023, arXiv:2305.12387. There B follows from the gradients' noise and the target accuracy;
        our `auto` replaces the latter by the current gradient norm, and is never below the number of workers. Here means are
        weighted by samples.
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
    """Every update is the mean of the workers' means, each over the gradients that the worker has sent in this round.

    A round begins once every worker has sent a gradient; then each makes one update with its next one. So the slowest
    worker's data count as much as the fastest one's, no gradient is lost, and none is more than 2 n - 2 updates late.

    Costs: up to two vectors per worker at the server, and a mean over them at every update.
    Use when: workers have different data (`skewed`, `fixed`), and are unequally fast.
    When N doubles: the updates per round and the staleness double: lower the learning rate.
    Not: `async`, which favours the fastest workers' data; `sync`, where fast workers wait.

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
    """A number of gradients, or its meter."""
    if asked == "auto":
        return NoiseMeter(num_workers)
    return num_workers if asked is None else asked
