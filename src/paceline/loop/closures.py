"""Closures that a loop gives to `step`: evaluated once, before anything else of the step, as one gradient is one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import UsageError

__all__ = ["Evaluated", "evaluate_first"]


class Evaluated:
    """A closure that has been evaluated, as the optimizer sees it: it has the loss, and no second gradient.

    Args:
        loss: what the closure has returned.
    """

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._is_asked = False

    def __call__(self) -> Any:
        """The loss.

        Raises:
            UsageError: the optimizer asks again.
        """
        if self._is_asked:
            raise UsageError(
                "This optimizer evaluates its closure several times in a step; attach needs one gradient per step: take an"
                " optimizer that evaluates it once, such as SGD or AdamW."
            )
        self._is_asked = True
        return self._loss


def evaluate_first(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Has the closure of every step evaluated before all hooks that are registered later; what it returns ends that.

    Raises:
        UsageError: the optimizer is LBFGS, which evaluates it several times; at its first step.
    """

    def evaluate(of: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 and not kwargs:  # the optimizer alone
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or isinstance(closure, Evaluated):
            return None
        if isinstance(of, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS evaluates several gradients per step; attach needs one: take another optimizer, such as AdamW."
            )
        with torch.enable_grad():
            evaluated = Evaluated(closure())
        return (of, *args[2:]), {**kwargs, "closure": evaluated}

    return optimizer.register_step_pre_hook(evaluate).remove
