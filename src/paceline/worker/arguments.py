"""The arguments of `attach`: one model or a tuple, one optimizer or a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.algorithms import Algorithm, registry
from paceline.data.wrappers import unwrapped_model, unwrapped_optimizer
from paceline.errors import UsageError
from paceline.membership.environment import WorkerEnvironment
from paceline.optim.several_optimizers import SeveralOptimizers


def as_one_optimizer(
    optimizer: Optimizer | Sequence[Optimizer],  # one or several
    algorithm: Algorithm | None,  # must support them; None: nothing to check
    environment: WorkerEnvironment | None,  # of the worker
    *,
    in_turn: bool,  # whether several step in turn
) -> Optimizer:
    """The given optimizers as one.

    Raises:
        UsageError: it is neither an optimizer nor a list of optimizers, or the algorithm takes only one, or another kind.
    """
    if isinstance(optimizer, Optimizer):
        optimizer = [optimizer]
    are_optimizers = isinstance(optimizer, list | tuple) and all(isinstance(one, Optimizer) for one in optimizer)
    if not (are_optimizers and optimizer):
        raise UsageError(
            f"attach needs an optimizer of torch.optim, or a list of them, but was given {_in_words(optimizer)}: if "
            "it is a wrapper, such as Lookahead, give attach the optimizer inside."
        )
    members = [unwrapped_optimizer(one) for one in optimizer]
    if len({id(one) for one in members}) < len(members):
        raise UsageError("attach was given the same optimizer twice: leave one out.")
    if len(members) > 1 and algorithm is not None and not algorithm.takes_several_optimizers:
        raise UsageError(
            f"{registry.spec(algorithm)} takes one optimizer, but attach was given {len(members)}: choose hogwild, "
            "locked or leashed, which paceline.launch starts, or lockstep, all-reduce, local-sgd or parameter-server, which"
            " torchrun can start, too; or make one optimizer with several parameter groups."
        )
    if algorithm is not None:
        algorithm.check_optimizers(members, (environment or WorkerEnvironment()).num_workers)
    return SeveralOptimizers(members, in_turn=in_turn) if len(members) > 1 else members[0]


def as_one_model(
    model: nn.Module | Sequence[nn.Module], evaluate: Callable[[Any], Any] | None
) -> tuple[nn.Module, Callable[[Any], Any] | None]:
    """The given models as one module, and an `evaluate` for that, which calls the user's with a tuple if there is one.

    Raises:
        UsageError: it is neither a module nor a tuple of modules.
    """
    if isinstance(model, nn.Module):
        return unwrapped_model(model), evaluate
    if not isinstance(model, list | tuple) or not model or not all(isinstance(one, nn.Module) for one in model):
        raise UsageError(f"attach needs a model, or a tuple of models, but was given {_in_words(model)}.")
    models = nn.ModuleList(unwrapped_model(one) for one in model)
    return models, None if evaluate is None else lambda all_of_them: evaluate(tuple(all_of_them))


def _in_words(given: Any) -> str:
    if not isinstance(given, list | tuple):
        return f"a {type(given).__name__}"
    return f"a {type(given).__name__} of {', '.join(type(one).__name__ for one in given) or 'nothing'}"
