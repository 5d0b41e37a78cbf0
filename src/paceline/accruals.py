"""Records of gradients that a worker keeps for a later update: they wait until it is known which one that is."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ACCRUED", "Accruals"]

ACCRUED = -2  # as a record's applied version, while it waits
_GRADIENT_VERSION, _APPLIED_VERSION = 5, 6  # places of these fields in a record; `memory/records.py` names them all


class Accruals:
    """Passes records on; those of accrued gradients with the next one that is decided, as of the same update.

    A worker that dies takes what it has accrued with it, gradients and records alike: what is recorded was applied or dropped.

    Args:
        write: takes a record's fields.
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
