"""Chooses a worker's membership: the only place that checks how its run was started."""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from torch import nn

from paceline.algorithms import Algorithm
from paceline.membership.elastic import JoinedRun
from paceline.membership.environment import (
    Invitation,
    LaunchedEnvironment,
    SupervisedEnvironment,
    WorkerEnvironment,
    attach_once,
)
from paceline.membership.rendezvous import common_store, own_part, wait_for_readers
from paceline.optim.flat import model_words
from paceline.worker.gathering import Gatherer, StoreGatherer, SupervisedGatherer
from paceline.worker.memberships.membership import Membership
from paceline.worker.user_evaluation import Evaluate

#: Called with the model, the algorithm, digests of the generators' states, and the loop's `evaluate`.
Join = Callable[[nn.Module, Algorithm, tuple[int, ...], Evaluate | None], Membership]


class Entry(NamedTuple):
    """A worker's place in a run that it has not joined yet."""

    worker_id: int
    num_workers: int
    join: Join


@dataclass(frozen=True, kw_only=True)
class SimulatedEnvironment(WorkerEnvironment):
    """A worker of `simulate`."""

    join: Join  # joins the simulated run


def is_plain(environment: WorkerEnvironment | None, algorithm: Algorithm) -> bool:
    """Whether a loop stays plain PyTorch: it has no launcher, and its algorithm does not delay a lone worker's gradients."""
    return environment is None and not (algorithm.max_workers == 1 and algorithm.lets_gradients_wait)


def enter(environment: WorkerEnvironment | None, model: nn.Module, algorithm: Algorithm) -> Entry:
    """A worker's place in its run; an invited worker takes one now. Imports what this kind of run needs.

    Raises:
        UsageError: the worker does not fit into the run, the run has no free place, or the worker has attached before.
    """
    match environment:
        case None:
            from paceline.worker.memberships.delayed import DelayedMembership

            return Entry(0, 1, DelayedMembership)
        case Invitation():
            from paceline.worker.memberships.elastic import ElasticMembership, report

            run = JoinedRun(environment, algorithm, model_words(model))
            report(run, environment.out, "started")
            return Entry(run.worker_id, run.num_workers, partial(ElasticMembership, run, environment.out))
    algorithm.check(environment.num_workers)
    match environment:
        case LaunchedEnvironment():
            from paceline.worker.memberships.launched import LaunchedMembership

            join: Join = partial(LaunchedMembership, environment)
        case SupervisedEnvironment():
            from paceline.worker.memberships.supervised import SupervisedMembership

            attach_once()
            join = partial(SupervisedMembership, environment)
        case SimulatedEnvironment():
            attach_once()
            join = environment.join
        case _:
            raise TypeError(f"{type(environment).__name__} is not an environment from which a worker can join a run")
    return Entry(environment.worker_id, environment.num_workers, join)


def meeting_beside(environment: WorkerEnvironment | None, stopped: Callable[[], bool]) -> Gatherer | None:
    """A gatherer that works before `attach` and after its `with`, until the processes end or the run is stopped.

    None for a lone worker, if workers join and leave, and for a replaced worker, for which the others do not wait.
    """
    match environment:
        case SupervisedEnvironment():
            gatherer = SupervisedGatherer(environment.supervisor, stopped, deadline_s=math.inf)
            if not environment.incarnation:
                return gatherer
            gatherer.leave()
        case LaunchedEnvironment():
            return _in_store(environment)
        case _:
            pass
    return None


@cache  # its calls are numbered
def _in_store(environment: LaunchedEnvironment) -> Gatherer:
    store, workers = own_part(common_store(environment), "beside"), environment.num_workers
    gatherer = StoreGatherer(store, environment.worker_id, workers, environment.deadline_s)
    atexit.register(wait_for_readers, store, "all", environment.worker_id, range(workers))
    atexit.register(gatherer.leave)  # before that
    return gatherer
