"""A model and its optimizers belong to one worker of the process, and only these optimizers may step on the model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import UsageError
from paceline.loop.guards.aliases import check_aliases

_held: dict[int, int] = {}  # ids of objects inside an `attach` of this process, which keeps them alive: their worker
_shared: set[int] = set()  # of these, the parameters that several workers share
_hooks: list[Any] = []  # of all optimizers of this process, as long as there are such parameters
_warned: WeakSet[torch.optim.Optimizer] = WeakSet()  # of these, that what they train has one worker
_is_inside: ContextVar[bool] = ContextVar("paceline_is_inside_attach", default=False)  # the loop that runs here
_lock = threading.Lock()


def hold(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    worker_id: int = 0,
    num_workers: int = 1,
) -> Callable[[], None]:
    """Reserves the model's trainable parameters, and the optimizers, for one worker; returns a function that frees them.

    With several workers, no other optimizer may step on these parameters, nor these optimizers on others. An optimizer that
    steps on other parameters trains each worker's own: a warning says so at its first step.

    Raises:
        UsageError: another worker of this process has them.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    one_each: list[Any] = [*optimizers, *trained]
    mine, of_several = {id(one) for one in one_each}, {id(p) for p in trained if num_workers > 1}
    # The inner optimizers of a wrapper such as Lookahead, which it steps within its own step.
    parts = {id(part) for one in optimizers for part in vars(one).values() if isinstance(part, torch.optim.Optimizer)}
    with _lock:
        if holders := [_held[one] for one in mine if one in _held]:
            raise UsageError(
                "This model, or its optimizer, is inside another attach already: leave that one first."
                if worker_id in holders
                else "The workers share one model, as it was made outside the function that each of them runs: make the"
                " model and the optimizer inside the function."
            )
        check_aliases(model, warns=worker_id == 0)
        _held.update(dict.fromkeys(mine | parts, worker_id))
        _watch_others(_shared | of_several)
    was_inside = _is_inside.get()
    _is_inside.set(True)

    def give_back() -> None:
        _is_inside.set(was_inside)
        with _lock:
            for one in mine | parts:
                _held.pop(one, None)
            _watch_others(_shared - of_several)

    return give_back


def _watch_others(shared: set[int]) -> None:
    global _shared  # a new set each time: an optimizer of another thread may be looking
    _shared = shared
    if shared and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    elif not shared and _hooks:
        _hooks.pop().remove()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if id(optimizer) in _held or optimizer in _warned:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    name = type(optimizer).__name__
    if any(id(p) in _shared for p in parameters):
        raise UsageError(
            f"The loop steps a {name} that attach was not given, on parameters that the workers share: give attach all of the"
            " loop's optimizers as a list, or leave the `with` before another one takes over."
        )
    if not _is_inside.get():
        return
    _warned.add(optimizer)
    warnings.warn(
        f"The loop steps a {name} that attach was not given, on parameters of which each worker has its own: they are not"
        " trained together. Give attach all models and optimizers, as in attach((a, b), [optimizer_a, optimizer_b]); or leave"
        " it so, if each worker's own is what you mean.",
        stacklevel=3,
    )
