"""Warn of learning-rate schedulers that follow one worker's steps, or epochs without batches, instead of the run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.loop.guards.guard import Guard
from paceline.loop.schedules import find_schedulers, schedulers_of

_FIRST, _LAST = 2, 12  # a scheduler's steps are counted between these steps of the optimizer


class UnfollowedSchedules(Guard):
    """Warns of a scheduler that counts only this worker's steps, although several workers train or have trained.

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
            if self._num_workers == 1:  # one that goes on from a saved state is where it should be
                self._found = [(one, before) for one, before in self._found if before <= _FIRST]
        elif self._num_steps == _LAST:
            if any(one.last_epoch - before >= _LAST - _FIRST for one, before in self._found):
                what = (
                    "A scheduler of the learning rate is stepped once per step, and so begins anew in this resumed run"
                )
                if (num_workers := self._num_workers) > 1:
                    what = (
                        f"A scheduler of the learning rate is stepped once per step of each of {num_workers} workers, and so"
                        f" ends at 1/{num_workers} of its way if it was made for one worker"
                    )
                warnings.warn(
                    f"{what}. Use `scheduler = worker.follow(scheduler)`, with samples_per_step=... where steps have fewer"
                    " samples than alone.",
                    stacklevel=4,
                )
            self._found = []


class SkippedEpochs(Guard):
    """Warns at the first step if `ReduceLROnPlateau` has counted epochs that a resumed run, or a replacement, has skipped.

    The loop goes through these epochs without batches, so their losses are all equal.

    Costs: two scans of all objects known to Python's garbage collector.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._before = {id(one): one.last_epoch for one in self._plateaus()}
        self._is_over = False

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_over:
            return
        self._is_over = True
        if any(one.last_epoch > self._before.get(id(one), 0) for one in self._plateaus()):
            warnings.warn(
                "ReduceLROnPlateau has counted epochs that this resumed loop went through without batches, as epochs without"
                " progress: step it only after an epoch in which the loop had a batch, and load its saved state before"
                " attach.",
                stacklevel=5,
            )

    def _plateaus(self) -> list[ReduceLROnPlateau]:
        return [one for one in find_schedulers(self._optimizers) if isinstance(one, ReduceLROnPlateau)]
