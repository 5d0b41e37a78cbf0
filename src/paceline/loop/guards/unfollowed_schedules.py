"""Warn of learning-rate schedulers that follow one worker's steps instead of the run's."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.loop.guards.guard import Guard
from paceline.loop.schedules import schedulers_of

_FIRST, _LAST = 2, 12  # a scheduler's steps are counted between these steps of the optimizer


class UnfollowedSchedules(Guard):
    """Warns of a scheduler that counts only this worker's steps, although several workers train.

    Costs: one scan of all objects known to Python's garbage collector, if the optimizer has had a scheduler.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_workers: int) -> None:
        self._optimizer = optimizer  # whose schedulers to find
        self._num_workers = num_workers
        self._num_steps = 0
        self._found: list[tuple[Any, int]] = []

    def silence(self) -> None:
        """Stops watching: the loop follows the run's progress."""
        self._num_steps = _LAST

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._num_steps >= _LAST or optimizer is not self._optimizer:
            return
        self._num_steps += 1
        if self._num_steps == _FIRST:
            by_steps = [one for one in schedulers_of([optimizer]) if not isinstance(one, ReduceLROnPlateau)]
            self._found = [(one, one.last_epoch) for one in by_steps if hasattr(one, "last_epoch")]
        elif self._num_steps == _LAST:
            if any(one.last_epoch - before >= _LAST - _FIRST for one, before in self._found):
                warnings.warn(
                    f"A scheduler of the learning rate is stepped once per step of each of {self._num_workers} workers, and so"
                    f" ends at 1/{self._num_workers} of its way if it was made for one worker. Use `scheduler ="
                    " worker.follow(scheduler)`, with samples_per_step=... where steps have fewer samples than alone.",
                    stacklevel=4,
                )
            self._found = []
