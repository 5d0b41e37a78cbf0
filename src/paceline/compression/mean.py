"""The protocol of a mean under way: started now, finished later."""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["Alone", "Mean", "Totals"]


class Totals(NamedTuple):
    """The sums that arrive with a mean."""

    weight: float  # of all workers' vectors, including those left out
    number: float  # the sum of all workers' numbers


class Mean(Protocol):
    """A mean under way."""

    def advance(self) -> None:
        """Waits for the first operation and starts the second; optional."""
        ...

    def wait(self) -> Totals:
        """Returns with the mean in place."""
        ...


class Alone:
    """The mean of one worker's vector: itself."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals

    def advance(self) -> None:
        """There is nothing to wait for."""

    def wait(self) -> Totals:
        return self._totals
