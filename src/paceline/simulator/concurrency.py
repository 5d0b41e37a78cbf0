"""Further programs of a simulated worker, and locks between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.ports.ports import Event, Mailbox
from paceline.simulator.mailbox import SimulatedMailbox
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler


class SimulatedConcurrency:
    """Programs beside `work`; implements `Concurrency`. They run in parallel and slow each other only through locks.

    A further program ends with its worker's `work` at the latest.
    """

    __slots__ = ("_worker_id", "scheduler", "waited_s", "wake_s")

    def __init__(self, scheduler: Scheduler, worker_id: int, wake_s: float) -> None:
        self.waited_s = 0.0  # seconds that `work` itself has waited for locks; the caller reads it and resets it to 0
        self.scheduler = scheduler
        self.wake_s = wake_s
        self._worker_id = worker_id

    def start(self, program: Callable[[], None], name: str) -> SimulatedJoinable:
        return SimulatedJoinable(self.scheduler, self.scheduler.start(self._worker_id, program, is_main=False), name)

    def serve(
        self, mailbox: Mailbox, kinds: tuple[str, ...], handle: Callable[[Event | None], float | None], name: str
    ) -> SimulatedJoinable:
        """Calls `handle` for incoming items; it has its own program only while it is blocked within a call."""
        assert isinstance(mailbox, SimulatedMailbox)
        return SimulatedJoinable(self.scheduler, mailbox.serve(kinds, handle), name)

    def lock(self) -> SimulatedLock:
        return SimulatedLock(self)


@dataclass(eq=False)
class SimulatedJoinable:
    """A further program; implements `Joinable`."""

    scheduler: Scheduler
    program: Program
    name: str

    def failed(self) -> bool:
        """False: an exception of a simulated program ends the run at once."""
        return False

    def join(self) -> None:
        self.scheduler.catch_up()
        if not self.program.over:
            self.program.joining.append(self.scheduler.current)
            self.scheduler.wait(f"the end of its program '{self.name}'")


class SimulatedLock:
    """Mutual exclusion; implements `Lock`. An uncontended lock costs nothing.

    A release frees it and wakes the first waiter, `wake_s` later. A program that comes before that takes the lock, as with
    a thread's lock, and the woken one waits again.
    """

    __slots__ = ("_free_at_s", "_held", "_owner", "_waiting")

    def __init__(self, owner: SimulatedConcurrency) -> None:
        self._owner = owner
        self._held = False
        self._free_at_s = 0.0  # if the last holder was ahead of the clock
        self._waiting: tuple[Program, ...] = ()

    def __enter__(self) -> None:
        scheduler = self._owner.scheduler
        program, begun_s = scheduler.current, scheduler.now_s
        if not self._held and self._free_at_s <= begun_s + program.ahead_s:
            self._held = True
            return
        scheduler.catch_up()
        while self._held or self._free_at_s > scheduler.now_s:
            if self._held:
                self._waiting = (*self._waiting, program)
                scheduler.wait("a lock of its own")
            else:
                scheduler.sleep(self._free_at_s - scheduler.now_s + self._owner.wake_s)
        self._held = True
        if program.is_main:
            self._owner.waited_s += scheduler.now_s - begun_s

    def __exit__(self, *exception: object) -> None:
        scheduler = self._owner.scheduler
        self._held = False
        self._free_at_s = scheduler.now_s + scheduler.current.ahead_s
        if self._waiting:
            following, *others = self._waiting
            self._waiting = tuple(others)
            scheduler.wake(following, scheduler.current.ahead_s + self._owner.wake_s)
