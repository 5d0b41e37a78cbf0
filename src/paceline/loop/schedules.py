"""Learning-rate schedulers: one that follows the run's progress, and those of an optimizer."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import UsageError
from paceline.system.torch_internals import is_followed_by_scheduler

_ROUNDING = 1e-6


class FollowedScheduler:
    """A scheduler stepped by the run: `step` does nothing; all else is the scheduler's."""

    def __init__(self, scheduler: Any, position: Callable[[], float]) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau follows a metric, not steps: leave it as it is, and step it with the same metric on"
                " all workers, such as worker.mean(loss)."
            )
        self.scheduler = scheduler  # any PyTorch scheduler that is stepped once per step of the optimizer
        self._position = position  # the run's present step, as a lone loop would count its steps
        self._begun_at = 0.0
        self._num_steps = 0  # made here
        self._seen = self._count

    def step(self, *position: Any) -> None:
        """Does nothing: the run's progress steps the scheduler; raises `UsageError` if the loop gives it a position."""
        if any(one is not None for one in position):
            raise UsageError(
                "The loop gives the scheduler its position, as in scheduler.step(epoch + i / n), but worker.follow counts"
                " steps: leave out worker.follow, which such a scheduler does not need."
            )

    def advance(self) -> None:
        """Steps the scheduler to where the run is; raises `UsageError` if the loop steps it, too."""
        if self._count != self._seen:
            raise UsageError(
                "The scheduler that worker.follow was given has been stepped by the loop as well: step the one that it"
                " returned, scheduler = worker.follow(scheduler), or none."
            )
        wanted = math.floor(self._position() - self._begun_at + _ROUNDING)
        end = getattr(self.scheduler, "total_steps", None)  # OneCycleLR's, which refuses to go on after it
        while self._num_steps < wanted and (end is None or self.scheduler.last_epoch < end):
            self.scheduler.step()
            self._num_steps += 1
        self._seen = self._count

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state, which includes the run's earlier progress."""
        self.scheduler.load_state_dict(state)
        self._begun_at, self._num_steps, self._seen = self._position(), 0, self._count

    @property
    def _count(self) -> int:
        return getattr(self.scheduler, "last_epoch", 0)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """The schedulers of these optimizers, to which PyTorch keeps no reference.

    Costs: two looks at all objects that Python's garbage collector knows, if one of the optimizers has had a scheduler.
    """
    return find_schedulers(optimizers) if any(map(is_followed_by_scheduler, optimizers)) else []


def find_schedulers(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """As `schedulers_of`, but also finds `ReduceLROnPlateau`, which leaves no trace in an optimizer; looks at all objects."""
    # gc.get_objects would also refer to tuples that other threads are building, which then fails with SystemError.
    owners = gc.get_referrers(*optimizers)
    owners += gc.get_referrers(*(one for one in owners if type(one) is dict))  # whose attributes are in a dict
    # By type: isinstance would load lazy modules.
    found = {id(one): one for one in owners if issubclass(type(one), LRScheduler)}.values()
    return [one for one in found if any(getattr(one, "optimizer", None) is optimizer for optimizer in optimizers)]
