"""A model and its optimizer belong to one worker: those made outside the function would be all workers' of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from paceline.environment import WorkerEnvironment
from paceline.errors import UsageError

__all__ = ["hold"]

_held: set[int] = set()  # ids of what is in an `attach` of this process, which keeps it alive meanwhile
_lock = threading.Lock()


def hold(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], environment: WorkerEnvironment | None
) -> Callable[[], None]:
    """Takes the model's trainable parameters, and the optimizers, for one worker; returns what gives them back.

    Raises:
        UsageError: another worker of this process has them.
    """
    one_each: list[Any] = [*optimizers, *(p for p in model.parameters() if p.requires_grad)]
    mine = {id(one) for one in one_each}
    with _lock:
        if mine & _held:
            what = "optimizer" if id(one_each[0]) in _held and mine & _held == {id(one_each[0])} else "model"
            raise UsageError(
                f"This {what} is inside another attach already: leave that one first."
                if environment is None
                else f"The workers share one {what}, as it was made outside the function that each of them runs: make the"
                " model and the optimizer inside the function."
            )
        _held.update(mine)

    def give_back() -> None:
        with _lock:
            _held.difference_update(mine)

    return give_back
