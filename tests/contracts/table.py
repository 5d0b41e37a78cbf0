"""One row per algorithm and variant. A contract that a row does not meet is named in the row, with the reason."""

from dataclasses import dataclass

import pytest

import paceline as pl
from paceline.algorithms.server.user import UserOptimizer
from paceline.algorithms.topology import Complete, Exponential, OnePeerExponential


@dataclass(frozen=True)
class Row:
    """An algorithm, and where it differs from what holds for all; a text is a reason, an empty one means: no exception.

    Args:
        algorithm: one of them.
        drops_updates: why a gradient may be given up.
        loses_updates: why an applied update may not be in the parameters.
        scales_fresh_updates: why an update with staleness 0 is not the optimizer's own.
        scales_stale_updates: why a stale update is not the optimizer's own.
        own_rule: why no update is the optimizer's own.
        accrues: why several gradients of a worker make one update.
        loses_progress: why the mean of the workers' models is not the sum of what they have learnt.
        rounds: why a mean gradient is not the exact one.
        follows_times: why two runs may round otherwise, and an epoch's last round is no whole batches.
        rate_follows_times: why the length of a step has no bound where other work delays a worker.
        waits_for_all: why no update is made before the slowest worker has begun.
        unreplayable: what of several workers' timing records do not have; it is in the result's reason.
        policy: what alone it differs by from another row; what checkpoints hold, and how they are read, is the same.
    """

    algorithm: pl.Algorithm
    drops_updates: str = ""
    loses_updates: str = ""
    scales_fresh_updates: str = ""
    scales_stale_updates: str = ""
    own_rule: str = ""
    accrues: str = ""
    loses_progress: str = ""
    rounds: str = ""
    follows_times: str = ""
    rate_follows_times: str = ""
    waits_for_all: str = ""
    unreplayable: str = ""
    policy: str = ""

    @property
    def together(self):
        """Whether all workers make one update together, on equal models."""
        return self.algorithm.together

    @property
    def served(self):
        """Whether servers hold the vector, and the optimizer."""
        return self.algorithm.needs.kind == "served"

    @property
    def is_default(self):
        """Whether it is its family's algorithm as it is by default, and no variant."""
        return self.algorithm == type(self.algorithm)()

    @property
    def learning_follows_times(self):
        """Whether what is learnt in some epochs depends on the times of the machine that trains."""
        return bool(self.rate_follows_times or self.waits_for_all)

    @property
    def spec(self):
        return pl.spec(self.algorithm)

    def workers(self, wanted):
        """As many of the wanted numbers of workers as the algorithm can use."""
        limit = self.algorithm.max_workers
        return [number for number in wanted if limit is None or number <= limit]

    def batches(self, number, workers):
        """In an epoch that is cut into so many: where batches follow times, all workers have a part of the last round."""
        return -(-number // workers) * workers if self.follows_times else number

    def most(self, wanted):
        return max(self.workers([1, wanted]))


_SPEEDS = "the sizes of batches follow measured times"
_RACES = "component-wise racing writes may overwrite each other"
_SERVERS_RULE = "AdaGrad at the servers is the method"
_ADAPTS = "the step size depends on staleness"
_LATE = "a merge drops most of what was learnt while the average was under way"
_TIMES = "a step is in proportion to its worker's measured time"
_WAITS = "how long it waits for the others"
_STEPS = "how long a step is"
_MEETS = "whom it averages with"
_OUTER = "an outer optimizer steps with what the workers have learnt, also with one worker"

ROWS = [
    Row(pl.Sequential()),
    Row(pl.Lockstep()),
    Row(pl.Lockstep(shares="auto"), follows_times=_SPEEDS, unreplayable="speeds"),
    Row(pl.AllReduce()),
    Row(pl.AllReduce(sharded=True)),
    Row(pl.parse("all-reduce(codec=qsgd(bits=8))"), rounds="levels are 1/127 of the largest element"),
    Row(pl.parse("all-reduce(codec=sign)"), rounds="what a sign does not say comes later"),
    Row(
        pl.AllReduce(shares="auto"),
        follows_times=_SPEEDS,
        unreplayable="speeds",
        policy="lockstep's and the sharded one's shares",
    ),
    Row(pl.AllReduce(shares="auto", sharded=True), follows_times=_SPEEDS, unreplayable="speeds"),
    Row(pl.Locked()),
    Row(pl.Locked(backoff=pl.ExponentialBackoff()), policy=_WAITS),
    Row(pl.Locked(step_size=pl.InverseStep()), scales_stale_updates=_ADAPTS, policy=_STEPS),
    Row(pl.Locked(kind="rwlock")),
    Row(pl.Locked(kind="rwlock", backoff=pl.ConstantBackoff(base=2.0)), policy=_WAITS),
    Row(pl.Hogwild(), loses_updates=_RACES, unreplayable="single elements"),
    Row(pl.Hogwild(reads="copy"), loses_updates=_RACES, unreplayable="single elements"),
    Row(
        pl.Hogwild(step_size=pl.ExponentialStep(threshold=3)),
        loses_updates=_RACES,
        unreplayable="single elements",
        scales_stale_updates=_ADAPTS,
        policy=_STEPS,
    ),
    Row(pl.Leashed()),
    Row(pl.Leashed(backoff=pl.ExponentialBackoff(base=0.5)), policy=_WAITS),
    Row(
        pl.Leashed(persistence=0),
        drops_updates="persistence 0 gives up after one failed publish",
        unreplayable="gradients were dropped",
    ),
    Row(
        pl.Leashed(persistence=1, backoff=pl.LinearBackoff()),
        drops_updates="persistence 1 gives up after two failed publishes",
        unreplayable="gradients were dropped",
        policy=_WAITS,
    ),
    Row(
        pl.Leashed(step_size=pl.TailStep()),
        unreplayable="numbers of late updates",
        scales_fresh_updates="after ten updates per worker, fresh gradients are amplified by 1 + A",
        scales_stale_updates=_ADAPTS,
        policy=_STEPS,
    ),
    Row(pl.LocalSGD(period=3)),
    Row(pl.LocalSGD(warmup_steps=5)),  # before the first uneven round, in which no gradient is its own worker's alone
    Row(pl.parse("local-sgd(period=3, codec=sign)"), loses_progress="what a sign does not say comes later"),
    Row(
        pl.parse("da-sgd(period=5, delay=3, merge=corrected, codec=qsgd)"),
        loses_progress="levels are of the largest change",
    ),
    Row(pl.DaSGD(), loses_progress=_LATE),
    Row(pl.DaSGD(period=5, delay=5, merge="corrected")),
    Row(pl.DaSGD(period=2, delay=2, merge="cocod")),
    Row(pl.DaSGD(period=3, delay=0), policy="a delay of 0 is local SGD"),
    Row(pl.DiLoCo(), own_rule=_OUTER, loses_progress=_OUTER),
    Row(pl.DiLoCo(period=9, fragments=2, delay=2, local_weight=0.5), own_rule=_OUTER, loses_progress=_OUTER),
    Row(pl.DPSGD()),
    Row(pl.DPSGD(topology=Exponential()), policy=_MEETS),
    Row(pl.DPSGD(topology=OnePeerExponential())),
    Row(pl.ADPSGD()),
    Row(pl.ADPSGD(topology=Complete(), peers="rotate"), policy=_MEETS),
    Row(pl.ParameterServer()),
    Row(
        pl.ParameterServer(mode=pl.Sync(backups=1), shards=2),
        drops_updates="gradients that come after the first N are dropped",
    ),
    Row(
        pl.ParameterServer(mode=pl.Sync(backups="auto"), shards=2),
        unreplayable="number of backup workers",
        drops_updates="where backups pay, gradients that come after the first N are dropped",
    ),
    Row(pl.ParameterServer(mode=pl.Async())),
    Row(pl.ParameterServer(mode=pl.Async(), durability="replica")),
    Row(pl.ParameterServer(mode=pl.Bounded(clock_bound=2), shards=2)),
    Row(
        pl.ParameterServer(mode=pl.Rennala(gradients=2)),
        unreplayable="gradients waited",
        drops_updates="gradients of earlier parameters are dropped",
        accrues="two gradients, of whatever workers, make one update",
    ),
    Row(pl.ParameterServer(mode=pl.Ringmaster(threshold=2)), drops_updates="gradients that are too late are dropped"),
    Row(
        pl.ParameterServer(mode=pl.Ringleader()),
        unreplayable="gradients waited",
        accrues="what a worker brings before its turn is in the update of its turn",
        scales_stale_updates="every update is a mean over all workers",
        scales_fresh_updates="every update is a mean over all workers",
        waits_for_all="every update is a mean over all workers: of one that begins late, the others have had all batches",
    ),
    Row(
        pl.ParameterServer(mode=pl.Async(rate="rescaled")),
        unreplayable="weights followed",
        scales_stale_updates=_TIMES,
        scales_fresh_updates=_TIMES,
        rate_follows_times=_TIMES,
    ),
    Row(pl.Downpour(), own_rule=_SERVERS_RULE),
    Row(
        pl.Downpour(fetch=2, push=3, apply=UserOptimizer(), warm_start_steps=20, shards=2),
        accrues="three gradients are pushed as one",
    ),
    Row(
        pl.AdaptiveRevision(shards=2),
        own_rule=_SERVERS_RULE,
        policy="the number of shards",
    ),
    Row(pl.AdaptiveRevision(), own_rule=_SERVERS_RULE),
]

assert {type(row.algorithm) for row in ROWS} == set(dict(pl.algorithms.registry.items()).values()), "a row for each"

#: One for each place that may hold the parameters and an optimizer's state.
HOLDERS = ("sequential", "lockstep", "hogwild", "leashed", "parameter-server")


def rows(keep=lambda row: True):
    """Parametrizes a test over the rows; `keep` says which the contract is about, never which fail it."""
    kept = [row for row in ROWS if keep(row)]
    return pytest.mark.parametrize("row", kept, ids=[row.spec for row in kept])


def backends(keep=lambda row: True):
    """Parametrizes over rows as `rows` does, each with a backend: processes for every family, and threads for its variants.

    A variant's program is the same on both, and three processes cost as much as ten runs of threads; `make soak` runs them.
    """
    cells = []
    for row in filter(keep, ROWS):
        if not row.is_default:
            cells.append(pytest.param(row, "threads", id=f"{row.spec}-threads"))
        marks = () if row.is_default else pytest.mark.soak
        cells.append(pytest.param(row, "processes", marks=marks, id=f"{row.spec}-processes"))
    return pytest.mark.parametrize(("row", "backend"), cells)


def runs(keep, *where):
    """Parametrizes over rows and pairs of a number of workers and a backend; processes of variants are for `make soak`."""
    cells = [
        pytest.param(
            row,
            workers,
            backend,
            marks=() if row.is_default or backend == "threads" else pytest.mark.soak,
            id=f"{row.spec}-{workers}-{backend}",
        )
        for row in filter(keep, ROWS)
        for workers, backend in where
    ]
    return pytest.mark.parametrize(("row", "workers", "backend"), cells)
