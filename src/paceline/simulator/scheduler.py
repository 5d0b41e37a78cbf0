"""Virtual time: worker programs run one at a time and hand over where they wait.

Every program is a greenlet, so plain blocking code needs no rewriting. The order of events depends on virtual times
and on nothing else: events of one instant happen in the order in which they were planned.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from paceline.simulator.program import DeadlockError, Program, ProgramError

__all__ = ["Box", "Scheduler"]

_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore  (-1 outside backward)


class Box(Protocol):
    """Where messages arrive."""

    def arrive(self, item: Any) -> Program | None:
        """Takes an item, outside any program, where it must not wait; the program that waited for it goes on at once."""
        ...


Event = Program | Callable[[], None] | tuple[Box, Any]


class Scheduler:
    """Runs programs under a virtual clock.

    `sleep`, `wait` and `wake` are called by running programs, through the simulated ports. The gradient mode is put back after
    each hand-over; random states are kept by the replicas, around the only code that draws from PyTorch's generator.

    A program that waits looks for what comes next itself and hands over to that program directly. Functions, and programs
    that begin, are left to the hub, the greenlet that called `run`: they may end programs, and a greenlet goes on
    counting the depth of recursion from where it was begun. Programs that serve share a few greenlets, one more than of them
    wait in the midst of something: ten thousand would fit in no cache.
    Costs: a hand-over about 1 us, with thousands of programs some more; a wait of the only program at its instant, before
    anybody else's next, no hand-over at all.

    Args:
        runs_torch: whether programs may compute with PyTorch (otherwise hand-overs need not look after its state).
        outside: wraps a hand-over so that it leaves the PyTorch contexts of the waiting program, which runs a user's code.

    Attributes:
        now_s: virtual time in seconds; the programs begin at 0.
        num_events: events so far, those of this instant included.
        current: the program that is running, or ran last.
    """

    def __init__(
        self,
        *,
        runs_torch: bool = True,
        outside: Callable[[Callable[[], None]], Callable[[], None]] = lambda hand_over: hand_over,
    ) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self.current: Program = Program(-1, is_main=False)  # nobody yet
        self._instants: list[float] = []  # a heap of the keys of `_planned`
        self._planned: dict[float, list[Event]] = {}  # the events of each, in their order
        self._due: list[Event] = []  # those that are left of the present instant, the next one last
        self._programs: list[Program] = []
        self._by_worker: dict[int, list[Program]] = {}
        self._num_main = 0  # main programs that have not ended
        self._hub = getcurrent()
        self._idle_greenlets: list[greenlet] = []  # for programs that serve; those that have nothing to do
        self._ended = False
        self._cut = False
        self._runs_torch = runs_torch
        self._let_others_run = outside(self._switch_with_torch if runs_torch else self._switch)
        self.time_s = self._now  # one object, which thousands of clocks share
        self.on_resume: Callable[[int], None] | None = None  # called with the worker that is about to run

    def _now(self) -> float:
        return self.now_s + self.current.ahead_s

    # What programs call

    def sleep(self, duration_s: float) -> None:
        """Goes on `duration_s` later."""
        current = self.current
        at_s = self.now_s + (current.ahead_s + duration_s)
        current.ahead_s = 0.0
        if self._ended:
            raise GreenletExit
        instants = self._instants
        if not self._due and (not instants or at_s < instants[0]):
            self.now_s = at_s
            return
        planned = self._planned.get(at_s)  # as `call_at`, without a call of it
        if planned is None:
            self._planned[at_s] = [current]
            heappush(instants, at_s)
        else:
            planned.append(current)
        self._let_others_run()

    def take(self, duration_s: float) -> None:
        """Lets the current program be ahead of the clock by so much more: it goes on at once, and its next `sleep` catches up.

        Saves a hand-over where nobody can see the difference: whatever others see of it must happen when the clock is there.
        """
        self.current.ahead_s += duration_s

    def catch_up(self) -> None:
        """Waits for the clock, if the program is ahead of it: to be called before it waits for others."""
        if self.current.ahead_s:
            self.sleep(0.0)

    def wait(self, what: str) -> None:
        """Waits until `wake` is called for this program; `what` is for the message should that never happen."""
        if self._ended:
            raise GreenletExit
        self.current.waits_for = what
        self._let_others_run()

    def wake(self, program: Program, after_s: float = 0.0) -> None:
        """Lets a program that waits go on, `after_s` from now."""
        self.call_at(self.now_s + after_s, program)

    def call_at(self, at_s: float, what: Event) -> None:
        """Plans a function called outside any program, where it must not wait, or a program that goes on, or an arrival."""
        planned = self._planned.get(at_s)
        if planned is None:
            self._planned[at_s] = [what]
            heappush(self._instants, at_s)
        else:
            planned.append(what)

    def stop(self) -> None:
        """Ends the simulation after the events planned for this instant; unfinished programs are cut off."""
        self.call_at(self.now_s, self._end)

    def cut(self) -> None:
        """Ends the simulation where it is; unlike `stop` it may be called at any point, as by a signal."""
        self._cut = self._ended = True

    def stop_at(self, at_s: float) -> None:
        """Ends the simulation then, if anything would still happen: what waits for ever by then is a deadlock as ever."""
        self.call_at(at_s, lambda: self.stop() if self._due or self._instants else None)

    # What runs them

    def start(self, worker_id: int, body: Callable[[], object], *, is_main: bool = True, server: str = "") -> Program:
        """Adds a program that begins now; the simulation ends with the last main one. Servers are named in messages."""
        program = Program(worker_id, is_main=is_main, server=server)
        gradients = torch.is_grad_enabled()

        def run() -> None:
            program.here = program.greenlet
            torch.set_grad_enabled(gradients)
            try:
                body()
                self.catch_up()
            finally:
                self._finished(program)

        program.greenlet = greenlet(run, self._hub)
        program.greenlet.gr_context = contextvars.copy_context()
        self._add(program)
        return program

    def start_serving(self, worker_id: int, serve: Callable[[], None]) -> Program:
        """Adds a further program that goes on now, and whenever it is woken, by a call of `serve`; `finish` ends it."""
        program = Program(worker_id, is_main=False)
        program.serve = serve
        self._add(program)
        return program

    def finish(self, program: Program) -> None:
        """Ends a program that serves; those that wait for that go on."""
        program.over = True
        program.here = None
        for waiting in program.joining:
            self.wake(waiting)

    def _add(self, program: Program) -> None:
        self._num_main += program.is_main
        self._programs.append(program)
        self._by_worker.setdefault(program.worker_id, []).append(program)
        self.wake(program)

    def end_worker(self, worker_id: int) -> None:
        """Ends all programs of a worker where they are; for functions of `call_at` only."""
        ended, self._ended = self._ended, True  # a program that waits while it is being ended is ended there
        for program in self._by_worker.get(worker_id, ()):
            if not program.over:
                self._throw(program)
                self._finished(program)  # where it had not begun
        self._ended = ended or self._cut or not self._num_main

    def run(self) -> None:
        """Runs until all main programs have ended, or `stop`.

        Raises:
            ProgramError: a program raised an exception; the others are cut off at that instant.
            DeadlockError: every program that is left waits for another.
        """
        self._hub = getcurrent()
        gradients = torch.is_grad_enabled()  # shared by a thread's greenlets; one that is cut off leaves its own
        for program in self._programs:
            if program.serve is None:
                program.greenlet.parent = self._hub
        try:
            what = self._next_event()
            while what is not None and not self._ended:
                if isinstance(what, Program):
                    what = self._resume(what)
                else:
                    what()
                    what = None
                if what is None and not self._ended:
                    what = self._next_event()
            if not self._ended and not all(program.over for program in self._programs):
                raise DeadlockError(self._programs, self.now_s)
        finally:
            self._cut_off()
            torch.set_grad_enabled(gradients)

    def _next_event(self) -> Program | Callable[[], None] | None:
        """Takes the next event; None: there is none. What arrives does so here."""
        due = self._due
        while True:
            if not due:
                if not self._instants:
                    return None
                at_s = self.now_s = heappop(self._instants)
                due = self._due = self._planned.pop(at_s)
                self.num_events += len(due)
                due.reverse()
            what = due.pop()
            if not isinstance(what, tuple):
                return what
            box, item = what
            program = box.arrive(item)
            if program is not None:
                return program

    def _resume(self, program: Program) -> Program | Callable[[], None] | None:
        """Lets a program run, from the hub; returns an event for the hub that comes next, or None: not known."""
        if program.over:
            return None  # its worker was ended meanwhile
        self.current = program
        if self.on_resume is not None:
            self.on_resume(program.worker_id)
        try:
            if program.here is not None or program.serve is None:
                return (program.here or program.greenlet).switch()
            return (self._idle_greenlets.pop() if self._idle_greenlets else greenlet(self._call, self._hub)).switch(
                program
            )
        except (Exception, SystemExit) as error:
            # `current` may be another one by now: programs hand over to each other.
            raise ProgramError(self.current, error, self.now_s) from error

    def _finished(self, program: Program) -> None:
        if program.over:
            return
        self.finish(program)
        if program.is_main:
            self._num_main -= 1
            if not self._num_main:
                self._ended = True

    def _call(self, program: Program) -> None:
        """Calls programs that serve, one after the other; the body of an idle greenlet."""
        me = getcurrent()
        while True:
            assert program.serve is not None
            if self._runs_torch:
                torch.set_grad_enabled(False)  # which is per thread, and as the program before has left it
            program.here = me
            program.serve()
            program.here = None
            what = self._next_event()
            while not (isinstance(what, Program) and what.serve is not None and what.here is None and not what.over):
                self._idle_greenlets.append(me)
                what = self._hand_over(what)
            program = self.current = what
            if self.on_resume is not None:
                self.on_resume(program.worker_id)

    def _switch(self) -> None:
        """Lets others run until this program goes on."""
        what = self._next_event()
        if what is self.current:
            return
        if self.on_resume is None and isinstance(what, Program) and (here := what.here) is not None:
            self.current = what
            here.switch(what)  # mostly: what `_hand_over` comes to, without a call of it
        else:
            self._hand_over(what)

    def _hand_over(self, what: Program | Callable[[], None] | None) -> Program:
        """Goes on with an event; returns once somebody goes on with the caller's greenlet, and with which program."""
        if isinstance(what, Program):
            here = what.here
            if here is None and what.serve is not None and self._idle_greenlets and not what.over:
                here = self._idle_greenlets.pop()
            if here is not None:
                self.current = what
                if self.on_resume is not None:
                    self.on_resume(what.worker_id)
                return here.switch(what)
        return self._hub.switch(what)

    def _switch_with_torch(self) -> None:
        if _graph_task_id() != -1:
            # Switching greenlets inside backward hung or crashed PyTorch in trials: its engine keeps state per thread.
            raise RuntimeError("A simulated worker may not wait inside backward; wait before or after it.")
        gradients = torch.is_grad_enabled()
        self.current.here = getcurrent()
        self._switch()
        if torch.is_grad_enabled() is not gradients:
            torch.set_grad_enabled(gradients)

    def _end(self) -> None:
        self._ended = True

    def _throw(self, program: Program) -> None:
        self.current = program
        if program.serve is None:
            program.greenlet.throw(GreenletExit)
        elif program.here is not None:
            program.here.throw(GreenletExit)

    def _cut_off(self) -> None:
        """Ends what is unfinished; a program that waits while it is being ended is ended there."""
        self._ended = True
        for program in self._programs:
            if not program.over:
                self._throw(program)
            program.serve = None  # it refers to the program
        while self._idle_greenlets:
            self._idle_greenlets.pop().throw(GreenletExit)
