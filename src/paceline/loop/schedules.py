"""Learning-rate schedules under `attach`: follow the run's progress; warn of those that follow one worker's steps."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import UsageError
from paceline.system.torch_internals import is_followed_by_scheduler

__all__ = ["FollowedScheduler", "UnfollowedSchedules"]

_FIRST, _LAST = 2, 12  # steps between which it is counted how often a scheduler steps
_ROUNDING = 1e-6


class FollowedScheduler:
    """A scheduler stepped by the run: `step` does nothing; all else is the scheduler's.

    Args:
        scheduler: any PyTorch scheduler that is stepped once per step of the optimizer.
        position: the run's present step, as a lone loop would count its steps.
    """

    def __init__(self, scheduler: Any, position: Callable[[], float]) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau goes by a measure, not by steps: leave it as it is, and step it with the same measure on"
                " all workers, such as worker.mean(loss)."
            )
        self.scheduler = scheduler
        self._position = position
        self._begun_at = 0.0
        self._num_steps = 0  # made here
        self._seen = self._count

    def step(self, *ignored: Any) -> None:
        """Does nothing: the run's progress steps the scheduler."""

    def advance(self) -> None:
        """Steps the scheduler to where the run is.

        Raises:
            UsageError: the loop steps it, too.
        """
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


class UnfollowedSchedules:
    """Warns of a scheduler that is stepped about once per step of one of several workers.

    Costs: one scan of all objects known to Python's garbage collector, if the optimizer has had a scheduler.

    Args:
        optimizer: whose schedulers to find.
        num_workers: of the run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_workers: int) -> None:
        self._optimizer = optimizer
        self._num_workers = num_workers
        self._num_steps = 0
        self._found: list[tuple[dict[str, Any], int]] = []

    def silence(self) -> None:
        """The loop goes by the run's progress."""
        self._num_steps = _LAST

    def after_step(self, *of_hook: Any) -> None:
        """The optimizer has stepped, and the scheduler for the step before."""
        if self._num_steps >= _LAST:
            return
        self._num_steps += 1
        if self._num_steps == _FIRST and is_followed_by_scheduler(self._optimizer):
            self._found = [(one, one["last_epoch"]) for one in _schedulers_of(self._optimizer)]
        elif self._num_steps == _LAST:
            if any(one["last_epoch"] - before >= _LAST - _FIRST for one, before in self._found):
                warnings.warn(
                    f"A scheduler of the learning rate is stepped once per step of each of {self._num_workers} workers, and so"
                    f" ends at 1/{self._num_workers} of its way if it was made for one worker. Use `scheduler ="
                    " worker.follow(scheduler)`, with samples_per_step=... where steps have fewer samples than alone.",
                    stacklevel=2,
                )
            self._found = []


def _schedulers_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The attributes of an optimizer's schedulers, to which PyTorch keeps no reference."""
    found = []
    for one in gc.get_referrers(optimizer):
        attributes = one if isinstance(one, dict) else getattr(one, "__dict__", {})
        by_a_measure = "patience" in attributes  # ReduceLROnPlateau
        if attributes.get("optimizer") is optimizer and "last_epoch" in attributes and not by_a_measure:
            found.append(attributes)
    return found
