"""The port through which a program lets the replacements of dead workers in."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Protocol

STOPPED = -1  # in place of a number of newcomers: none comes, as the run is being stopped


class Refusal(IntEnum):
    """Why the others cannot let a replacement in; a process tells another its number."""

    UNLIKE = 1
    SCHEDULES = 2
    SCALED = 3
    CLOSURES = 4
    OWN_BATCHES = 5
    OPTIMIZER = 6

    @property
    def why(self) -> str:
        return _WHY[self]


_WHY = {
    Refusal.UNLIKE: "its loop does not make the same updates as the others', for example because it computes learning rates"
    " from its own count of steps; use worker.progress or a scheduler",
    Refusal.SCHEDULES: "the loop has several schedulers of one class, or only some of its schedulers follow the run",
    Refusal.SCALED: "the others' GradScaler has a scale that it cannot have",
    Refusal.CLOSURES: "the optimizer evaluates closures",
    Refusal.OWN_BATCHES: "its loop does not get its batches from worker.batches",
    Refusal.OPTIMIZER: "its optimizer, or one of its schedulers, is not like the others'",
}


class Newcomers(Protocol):
    """The replacements of dead workers, and how the others let them in, all at the same step.

    Newcomers are mappings from worker ids to incarnations.

    Attributes:
        min_workers: if fewer than this many workers are left, they wait for newcomers.
    """

    min_workers: int

    def accepted(self, epoch: int) -> dict[int, int]:
        """Those that wait and can come in before the next step; only the first worker asks.

        Args:
            epoch: this worker's; a newcomer's loop must have reached it.
        """
        ...

    def expected(self, waited_s: float) -> int:
        """How many are on their way and not let in yet, or `STOPPED`. Only the first worker asks.

        Args:
            waited_s: how long the members have waited.
        """
        ...

    def refuse(self, newcomers: Mapping[int, int], why: Refusal) -> None:
        """Tells accepted newcomers that they cannot come in after all."""

    def let_in(self, newcomers: Mapping[int, int], giver: int) -> None:
        """Notes who comes in, and which worker gives them the state; all workers call it."""

    def give(self, newcomers: Mapping[int, int], state: dict[str, Any]) -> None:
        """Gives newcomers that are let in what all workers have; only the first worker does."""
