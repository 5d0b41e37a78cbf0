"""Records that a worker keeps back: of gradients for a later update, of steps whose loss has not been reported."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.records.step_record import RECORD_DTYPE, Recorder

__all__ = ["ACCRUED", "Accruals", "LateLosses", "WithoutSamples"]

ACCRUED = -2  # as a record's applied version, while it waits
_FIELDS = list(RECORD_DTYPE.names or ())
_BATCH, _SAMPLES, _GRADIENT_VERSION, _APPLIED_VERSION, _LOSS = map(
    _FIELDS.index, ("batch", "samples", "gradient_version", "applied_version", "loss")
)


class Accruals:
    """Passes records on; those of accrued gradients with the next one that is decided, as of the same update.

    A worker that dies takes what it has accrued with it, gradients and records alike: what is recorded was applied or dropped.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._waiting: list[tuple[float, ...]] = []

    def append(self, *fields: float) -> None:
        """Takes one record."""
        if fields[_APPLIED_VERSION] == ACCRUED:
            self._waiting.append(fields)
            return
        self.settle(fields[_APPLIED_VERSION], fields[_GRADIENT_VERSION])
        self._write(*fields)

    def settle(self, applied_version: float, gradient_version: float) -> None:
        """All accrued gradients have become this update; -1: they were dropped."""
        for fields in self._waiting:
            decided = list(fields)
            decided[_APPLIED_VERSION], decided[_GRADIENT_VERSION] = applied_version, gradient_version
            self._write(*decided)
        self._waiting.clear()


class LateLosses:
    """Passes records on; one without a loss once that is known, or will not be: a loop may report it after its step.

    Attributes:
        without_loss: the record that waits for its loss; None: none does.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self.write = write
        self.without_loss: tuple[float, ...] | None = None

    def append(self, *fields: float) -> None:
        """Takes one record; a round without a batch has no loss."""
        if fields[_SAMPLES] and math.isnan(fields[_LOSS]):
            self.without_loss = fields
        else:
            self.write(*fields)

    def settle(self, loss: float, samples: int | None = None) -> bool:
        """Gives the record that waits for its loss that loss, and its number of samples; returns whether one waits."""
        if self.without_loss is None:
            return False
        fields, self.without_loss = list(self.without_loss), None
        fields[_LOSS] = loss
        if samples is not None:
            fields[_SAMPLES] = samples
        self.write(*fields)
        return True


class WithoutSamples:
    """Implements `Recorder` for a worker that trains on the samples of another, in whose records they count."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def append(self, *fields: float) -> None:
        changed = list(fields)
        changed[_BATCH], changed[_SAMPLES], changed[_LOSS] = -1, 0, math.nan
        self._recorder.append(*changed)
