"""A memory bus shared by concurrent transfers."""

from __future__ import annotations

from heapq import heappop, heappush

from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler


class MemoryBus:
    """Fair sharing: each of n concurrent transfers runs at min(core bandwidth, bus bandwidth / n).

    All rates are equal, so the bus keeps one number, the bytes that every transfer has been served since the bus was last
    idle; a transfer ends when that number has grown by its bytes.
    Costs: O(log n) per transfer.
    """

    def __init__(self, scheduler: Scheduler, core_bytes_per_s: float, bus_bytes_per_s: float) -> None:
        self._scheduler = scheduler
        self._core_bytes_per_s = core_bytes_per_s
        self._bus_bytes_per_s = bus_bytes_per_s
        self._served = 0.0  # bytes per transfer since the bus was idle
        self._served_at_s = 0.0
        self._transfers: list[tuple[float, int, Program]] = []  # by the value of `_served` at which they end
        self._number = 0
        self._plan_number = 0  # of the current planned completion
        self._planned_rate = 0.0  # at which it was planned

    def move(self, num_bytes: float) -> None:
        if num_bytes <= 0:
            return
        if not self._transfers:
            self._served = 0.0
        self._serve()
        self._number += 1
        heappush(self._transfers, (self._served + num_bytes, self._number, self._scheduler.current))
        if self._rate != self._planned_rate or self._transfers[0][1] == self._number:
            self._plan_completion()
        self._scheduler.wait("the memory bus")

    @property
    def _rate(self) -> float:
        return min(self._core_bytes_per_s, self._bus_bytes_per_s / len(self._transfers))

    def _serve(self) -> None:
        now_s = self._scheduler.now_s
        if self._transfers:
            self._served += (now_s - self._served_at_s) * self._rate
        self._served_at_s = now_s

    def _plan_completion(self) -> None:
        self._plan_number += 1
        plan_number, self._planned_rate = self._plan_number, self._rate
        left_bytes = max(0.0, self._transfers[0][0] - self._served)

        def complete() -> None:
            if plan_number == self._plan_number:  # otherwise another transfer came or went meanwhile
                self._complete()

        self._scheduler.call_at(self._scheduler.now_s + left_bytes / self._planned_rate, complete)

    def _complete(self) -> None:
        self._served = self._transfers[0][0]  # exactly, so that rounding errors do not add up
        self._served_at_s = self._scheduler.now_s
        while self._transfers and self._transfers[0][0] <= self._served:
            self._scheduler.wake(heappop(self._transfers)[2])
        if self._transfers:
            self._plan_completion()
