"""A model and its optimizers belong to one worker: not to all of a process, and to no optimizer that attach does not know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import UsageError
from paceline.loop.trained_parameters import watch_trained
from paceline.membership.environment import WorkerEnvironment

__all__ = ["hold"]

_held: set[int] = set()  # ids of what is in an `attach` of this process, which keeps it alive meanwhile
_shared: set[int] = set()  # of these, the parameters that have several workers
_hooks: list[Any] = []  # of all optimizers of this process, as long as there are such parameters
_lock = threading.Lock()


def hold(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    environment: WorkerEnvironment | None,
    num_workers: int = 1,
) -> Callable[[], None]:
    """Takes the model's trainable parameters, and the optimizers, for one worker; returns what gives them back.

    Of several workers, no other optimizer may step on them meanwhile, and these on no others.

    Raises:
        UsageError: another worker of this process has them, or the optimizers have other parameters.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    one_each: list[Any] = [*optimizers, *trained]
    mine, of_several = {id(one) for one in one_each}, {id(p) for p in trained if num_workers > 1}
    parts = {id(part) for one in optimizers for part in _parts_of(one)}
    with _lock:
        if mine & _held:
            raise UsageError(
                "This model, or its optimizer, is inside another attach already: leave that one first."
                if environment is None
                else "The workers share one model, as it was made outside the function that each of them runs: make the"
                " model and the optimizer inside the function."
            )
        unwatch = watch_trained(model, optimizers) if num_workers > 1 else _nothing
        _held.update(mine | parts)
        _watch_others(_shared | of_several)

    def give_back() -> None:
        unwatch()
        with _lock:
            _held.difference_update(mine | parts)
            _watch_others(_shared - of_several)

    return give_back


def _nothing() -> None:
    pass


def _parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Those that one such as Lookahead is made of, and steps within its own step."""
    return [part for part in vars(optimizer).values() if isinstance(part, torch.optim.Optimizer)]


def _watch_others(shared: set[int]) -> None:
    global _shared  # a new set each time: an optimizer of another thread may be looking
    _shared = shared
    if shared and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    elif not shared and _hooks:
        _hooks.pop().remove()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if id(optimizer) not in _held and any(
        id(p) in _shared for group in optimizer.param_groups for p in group["params"]
    ):
        raise UsageError(
            f"The loop steps a {type(optimizer).__name__} that attach was not given, on parameters that the workers share:"
            " give attach all of the loop's optimizers as a list, or leave the `with` before another one takes over."
        )
