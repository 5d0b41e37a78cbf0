"""A program as the scheduler keeps it, and two errors by which programs end a simulation early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from greenlet import greenlet as Greenlet

from paceline.errors import PacelineError

_NAMED_IN_DEADLOCK = 8


class DeadlockError(PacelineError):
    """Every program waits for another one: no event can happen any more."""

    def __init__(self, programs: Sequence[Program], at_s: float) -> None:
        left = [one for one in programs if not one.over]
        said = [f"{one.name} waits for {one.waits_for}" for one in left[:_NAMED_IN_DEADLOCK]]
        if len(left) > _NAMED_IN_DEADLOCK:
            more = "programs" if any(one.server for one in left) else "workers"
            said.append(f"so do {len(left) - _NAMED_IN_DEADLOCK} more {more}")
        ended = [one.server or str(one.worker_id) for one in programs if one.over][:_NAMED_IN_DEADLOCK]
        ends = f" (ended already: {', '.join(ended)})" if ended else ""
        self.waits = f"{'; '.join(said)}{ends}"  # for what each waits, as a part of a sentence
        super().__init__(f"Deadlock at {at_s:.6g} s of virtual time: {self.waits}.")


class ProgramError(PacelineError):
    """A program raised an exception, which is the cause of this error."""

    def __init__(self, program: Program, cause: BaseException, at_s: float) -> None:
        name = program.name[0].upper() + program.name[1:]
        super().__init__(f"{name} failed at {at_s:.6g} s of virtual time: {type(cause).__name__}: {cause}")
        self.worker_id = program.worker_id
        self.cause = cause


@dataclass(eq=False, slots=True)
class Program:
    """One program of a worker, as the scheduler keeps it."""

    worker_id: int
    _: KW_ONLY
    is_main: bool  # whether it is the worker's `work`, and not a further program
    server: str = ""  # its name if it is not a worker's
    waits_for: str = ""  # an untimed wait: a lock, a barrier
    joining: list[Program] = field(default_factory=list)
    over: bool = False
    #: Of a serving program: called each time it is woken; None: it has its own greenlet.
    serve: Callable[[], None] | None = None
    ahead_s: float = 0.0  # how far it is ahead of the clock since it resumed
    greenlet: Greenlet = field(init=False)
    #: The greenlet that waits: the program's own, or one that it runs inside itself; None before the program has begun and
    #: after its end, and while a serving one is idle.
    here: Greenlet | None = None

    @property
    def name(self) -> str:
        return self.server or f"worker {self.worker_id}"
