"""Further programs of a simulated worker, and locks between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.ports.ports import Event, Mailbox
from paceline.simulator.mailbox import SimulatedMailbox
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler


@dataclass(eq=False, slots=True)
class SimulatedConcurrency:
    """Programs beside `work`; implements `Concurrency`. They run in parallel and slow each other only through locks.

    A further program ends with its worker's `work` at the latest.
    """

    scheduler: Scheduler
    worker_id: int
    wake_s: float
    waited_s: float = 0.0  # seconds that `work` itself has waited for locks; the caller reads it and resets it to 0

    def start(self, program: Callable[[], None], name: str) -> SimulatedJoinable:
        return SimulatedJoinable(self.scheduler, self.scheduler.start(self.worker_id, program, is_main=False), name)

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


@dataclass(eq=False, slots=True)
class SimulatedLock:
    """Mutual exclusion; implements `Lock`. An uncontended lock costs nothing.

    A release frees it and wakes the first waiter, `wake_s` later. A program that comes before that takes the lock, as with
    a thread's lock, and the woken one waits again.
    """

    owner: SimulatedConcurrency
    held: bool = False
    free_at_s: float = 0.0  # if the last holder was ahead of the clock
    waiting: tuple[Program, ...] = ()

    def __enter__(self) -> None:
        scheduler = self.owner.scheduler
        program, begun_s = scheduler.current, scheduler.now_s
        if not self.held and self.free_at_s <= begun_s + program.ahead_s:
            self.held = True
            return
        scheduler.catch_up()
        while self.held or self.free_at_s > scheduler.now_s:
            if self.held:
                self.waiting = (*self.waiting, program)
                scheduler.wait("a lock of its own")
            else:
                scheduler.sleep(self.free_at_s - scheduler.now_s + self.owner.wake_s)
        self.held = True
        if program.is_main:
            self.owner.waited_s += scheduler.now_s - begun_s

    def __exit__(self, *exception: object) -> None:
        scheduler = self.owner.scheduler
        self.held = False
        self.free_at_s = scheduler.now_s + scheduler.current.ahead_s
        if self.waiting:
            following, *others = self.waiting
            self.waiting = tuple(others)
            scheduler.wake(following, scheduler.current.ahead_s + self.owner.wake_s)
