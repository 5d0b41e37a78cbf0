"""Which membership a worker gets: the one place that asks how its run was started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import nn

from paceline.algorithms import Algorithm
from paceline.evaluation.user import Evaluate
from paceline.membership.elastic import JoinedRun
from paceline.membership.environment import (
    Invitation,
    LaunchedEnvironment,
    SupervisedEnvironment,
    WorkerEnvironment,
    attach_once,
)
from paceline.vectors.flat import model_words
from paceline.worker.memberships.alone import AloneMembership
from paceline.worker.memberships.elastic import ElasticMembership, report
from paceline.worker.memberships.launched import LaunchedMembership
from paceline.worker.memberships.membership import Membership
from paceline.worker.memberships.supervised import SupervisedMembership

__all__ = ["Entry", "SimulatedEnvironment", "enter"]

#: Called with the model, the algorithm, digests of the generators' states, and the loop's `evaluate`.
Join = Callable[[nn.Module, Algorithm, tuple[int, ...], Evaluate | None], Membership]


class Entry(NamedTuple):
    """A worker's place in a run that it has yet to join."""

    worker_id: int
    num_workers: int
    join: Join


@dataclass(frozen=True, kw_only=True)
class SimulatedEnvironment(WorkerEnvironment):
    """A worker of `simulate`.

    Args:
        join: lets it into the simulated run.
    """

    join: Join


def enter(environment: WorkerEnvironment | None, model: nn.Module, algorithm: Algorithm) -> Entry:
    """A worker's place in its run; one that is invited is given one now.

    Raises:
        UsageError: the worker does not fit into the run, or there is no place for it, or it has attached before.
    """
    match environment:
        case None:
            algorithm.check(1)
            return Entry(0, 1, AloneMembership)
        case Invitation():
            run = JoinedRun(environment, algorithm, model_words(model))
            report(run, environment.out, "started")
            return Entry(run.worker_id, run.num_workers, partial(ElasticMembership, run, environment.out))
    algorithm.check(environment.num_workers)
    match environment:
        case LaunchedEnvironment():
            join: Join = partial(LaunchedMembership, environment)
        case SupervisedEnvironment():
            attach_once()
            join = partial(SupervisedMembership, environment)
        case SimulatedEnvironment():
            attach_once()
            join = environment.join
        case _:
            raise TypeError(f"{type(environment).__name__} is no environment that a worker can join a run from")
    return Entry(environment.worker_id, environment.num_workers, join)
