"""Records that a worker holds back: of gradients for a later update, and of steps whose loss is not reported yet."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.records.step_record import RECORD_DTYPE, Recorder

ACCRUED = -2  # as a record's applied version, while it waits
_FIELDS = list(RECORD_DTYPE.names or ())
_BATCH, _SAMPLES, _GRADIENT_VERSION, _APPLIED_VERSION, _LOSS = map(
    _FIELDS.index, ("batch", "samples", "gradient_version", "applied_version", "loss")
)


class Accruals:
    """Passes records on; holds those of accrued gradients until the update that applies or drops them.

    A dead worker's accrued gradients and their records are lost together: every recorded gradient was applied or dropped.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._waiting: list[tuple[float, ...]] = []

    def append(self, *fields: float) -> None:
        if fields[_APPLIED_VERSION] == ACCRUED:
            self._waiting.append(fields)
            return
        self.settle(fields[_APPLIED_VERSION], fields[_GRADIENT_VERSION])
        self._write(*fields)

    def settle(self, applied_version: float, gradient_version: float) -> None:
        """Records that all accrued gradients have become this update; -1: they were dropped."""
        for fields in self._waiting:
            decided = list(fields)
            decided[_APPLIED_VERSION], decided[_GRADIENT_VERSION] = applied_version, gradient_version
            self._write(*decided)
        self._waiting.clear()


class LateLosses:
    """Passes records on; holds one without a loss until the loop reports it, possibly after the step, or no longer can."""

    def __init__(self, write: Callable[..., None]) -> None:
        self.write = write
        self.without_loss: tuple[float, ...] | None = None  # the record that waits for its loss, or None

    def append(self, *fields: float) -> None:
        """Takes one record; a round without a batch has no loss."""
        if fields[_SAMPLES] and math.isnan(fields[_LOSS]):
            self.without_loss = fields
        else:
            self.write(*fields)

    def settle(self, loss: float, samples: int | None = None) -> bool:
        """Sets the loss and the number of samples of the waiting record; returns whether one waits."""
        if self.without_loss is None:
            return False
        fields, self.without_loss = list(self.without_loss), None
        fields[_LOSS] = loss
        if samples is not None:
            fields[_SAMPLES] = samples
        self.write(*fields)
        return True


class WithoutSamples:
    """Implements `Recorder` for a worker that trains on another's samples, which count in that one's records.

    `counts_updates`: its updates have the other's versions; otherwise only the other's are the run's.
    """

    def __init__(self, recorder: Recorder, *, counts_updates: bool = True) -> None:
        self._recorder, self._counts_updates = recorder, counts_updates

    def append(self, *fields: float) -> None:
        changed = list(fields)
        changed[_BATCH], changed[_SAMPLES], changed[_LOSS] = -1, 0, math.nan
        changed[_APPLIED_VERSION] *= self._counts_updates
        self._recorder.append(*changed)
