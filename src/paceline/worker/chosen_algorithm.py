"""Chooses the algorithm of a loop under `attach`: its own choice, its launcher's, or a default."""

from __future__ import annotations

from paceline.algorithms import DEFAULT_ALGORITHM, Algorithm, registry
from paceline.errors import UsageError, shown
from paceline.membership.environment import WorkerEnvironment, named_algorithm


def given_algorithm(algorithm: Algorithm | str | None) -> Algorithm | None:
    """The algorithm from an instance, a spec, or None.

    Raises:
        UsageError: the argument is something else, or the spec is wrong.
    """
    if isinstance(algorithm, str):
        return registry.build(algorithm)
    if algorithm is not None and not isinstance(algorithm, Algorithm):
        raise UsageError(f"algorithm must be a spec, such as 'hogwild', or pl.Hogwild(), not {shown(algorithm)}.")
    return algorithm


def chosen_algorithm(
    algorithm: Algorithm | str | None, environment: WorkerEnvironment | None, program: Algorithm | None = None
) -> Algorithm:
    """The algorithm of a worker, from the argument of `attach` and its environment; `program`: unless either names one.

    Raises:
        UsageError: the launcher and the loop name different ones, or it does not support users' loops.
    """
    named = given_algorithm(algorithm)
    launched = environment.algorithm if environment is not None else None
    given = registry.build(launched) if launched else None
    if given is None and named is None:
        named = program
    if given is None and (variable := named_algorithm()) is not None:
        given = registry.build(variable)
    if named is not None and given is not None and named != given:
        raise UsageError(
            f"attach names {registry.spec(named)}, but the launcher names {registry.spec(given)}: name the algorithm "
            "in one place."
        )
    chosen = named or given or registry.build(DEFAULT_ALGORITHM)
    if chosen.needs.averaged:
        raise UsageError(
            "Only paceline train and simulate evaluate average=...: leave it out of your own loop, and use "
            "torch.optim.swa_utils.AveragedModel."
        )
    return chosen
