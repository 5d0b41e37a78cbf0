"""A mean under way: started now, finished later."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from paceline.ports.ports import Handle


class Totals(NamedTuple):
    """The sums that arrive with a mean."""

    weight: float  # of all workers' vectors, including those left out
    numbers: list[float]  # the sums of all workers' numbers
    members: Sequence[int]  # the workers whose vectors the mean contains


#: Yields each collective operation once it is started, or None in its place, and continues with its members when it has ended.
Steps = Generator[Handle | None, Sequence[int], Totals]


class Mean:
    """A mean under way, in two operations, of which the first is started now; in more if a worker dies meanwhile."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._handle: Handle | None = None
        self._totals: Totals | None = None
        self._has_begun = self._has_advanced = False
        self._go_on()

    def advance(self) -> None:
        """Waits for the first operation and starts the second; optional."""
        if not self._has_advanced:
            self._go_on()
            self._has_advanced = True

    def wait(self) -> Totals:
        while self._totals is None:
            self._go_on()
        return self._totals

    def _go_on(self) -> None:
        members = self._handle.wait() if self._handle is not None else ()
        if self._totals is None:
            try:
                self._handle = self._steps.send(members) if self._has_begun else next(self._steps)
                self._has_begun = True
            except StopIteration as end:
                if end.value is None:
                    raise RuntimeError("This mean has failed before.") from None
                self._handle, self._totals = None, end.value
