"""Which algorithm a loop under `attach` runs: what it names itself, what its launcher says, or a default."""

from __future__ import annotations

from paceline.algorithms import ADPSGD, Algorithm, AllReduce, Hogwild, registry
from paceline.environment import WorkerEnvironment, named_algorithm
from paceline.errors import UsageError

__all__ = ["chosen_algorithm"]


def chosen_algorithm(algorithm: Algorithm | str | None, environment: WorkerEnvironment | None) -> Algorithm:
    """The algorithm of a worker, by what `attach` was given and where it runs.

    Raises:
        UsageError: the launcher and the loop name different ones, or it is none for a loop of one's own.
    """
    named = registry.build(algorithm) if isinstance(algorithm, str) else algorithm
    launched = environment.algorithm if environment is not None else None
    given = registry.build(launched) if launched else None
    if given is None and (variable := named_algorithm()) is not None:
        given = registry.build(variable)
    if named is not None and given is not None and named != given:
        raise UsageError(
            f"attach names {registry.spec(named)} but the launcher {registry.spec(given)}: name the algorithm in one place."
        )
    default = AllReduce()
    if environment is None or environment.supervised:
        default = Hogwild()
    elif environment.invitation is not None:
        default = ADPSGD()
    chosen = named or given or default
    if chosen.memory.averaged:
        raise UsageError(
            "average=... is what paceline train and simulate evaluate, and a loop of your own evaluates by itself: leave it"
            " out, and take torch.optim.swa_utils.AveragedModel."
        )
    return chosen
