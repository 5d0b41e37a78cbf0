"""The interface of guards: they are called around each step of the loop's optimizers."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Guard:
    """Watches for one thing that loops do; a subclass overrides the methods that it needs."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradient is computed, and this optimizer is about to step."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer has stepped."""

    def close(self) -> None:
        """Stops watching, as the worker leaves."""


class Guards:
    """Calls those guards of a worker that are switched on."""

    def __init__(self) -> None:
        self.before_step: list[Callable[[torch.optim.Optimizer], None]] = []  # of those guards that have one
        self.after_step: list[Callable[[torch.optim.Optimizer], None]] = []  # likewise
        self._guards: list[Guard] = []

    def add(self, guard: Guard) -> None:
        self._guards.append(guard)
        if type(guard).before_step is not Guard.before_step:
            self.before_step.append(guard.before_step)
        if type(guard).after_step is not Guard.after_step:
            self.after_step.append(guard.after_step)

    def close(self) -> None:
        self.before_step.clear()
        self.after_step.clear()
        while self._guards:
            self._guards.pop().close()
