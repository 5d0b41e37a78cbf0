"""Virtual time: worker programs run one at a time and hand over where they wait.

Every program is a greenlet, so plain blocking code needs no rewriting. The order of events depends only on virtual
times: events of one instant happen in the order in which they were planned.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from paceline.simulator.program import DeadlockError, Program, ProgramError
from paceline.system.torch_internals import graph_task


class Box(Protocol):
    """Where messages arrive."""

    def arrive(self, item: Any) -> Program | None:
        """Receives an item outside any program, so must not wait; returns the program to resume."""
        ...


Event = Program | Callable[[], None] | tuple[Box, Any]


class Scheduler:
    """Runs programs under a virtual clock.

    Running programs call `sleep`, `wait` and `wake` through the simulated ports. Each hand-over restores the gradient mode;
    the replicas keep random states, around the only code that draws from PyTorch's generator.

    A waiting program takes the next event itself and hands over to its program directly. Functions, and programs that
    begin, are left to the hub, the greenlet that called `run`: they may end programs, and a greenlet keeps counting the
    recursion depth from where it was started. Serving programs share a few greenlets, one more than the number of them
    that are blocked within a call: ten thousand would not fit in any cache.
    Costs: a hand-over takes about 1 us, somewhat more with thousands of programs. A wait needs none if its program is the
    only one at its instant and no other program comes earlier.

    Args:
        runs_torch: whether programs may compute with PyTorch (otherwise hand-overs do not restore its state).
        outside: wraps a hand-over so that it leaves the PyTorch contexts of the waiting program, which runs user code.

    Attributes:
        current: the program that is running, or ran last.
    """

    def __init__(
        self,
        *,
        runs_torch: bool = True,
        outside: Callable[[Callable[[], None]], Callable[[], None]] = lambda hand_over: hand_over,
    ) -> None:
        self.now_s = 0.0  # virtual time in seconds; the programs begin at 0
        self.num_events = 0  # number of events so far, including those of this instant
        self.current: Program = Program(-1, is_main=False)  # none yet
        self._instants: list[float] = []  # a heap of the keys of `_planned`
        self._planned: dict[float, list[Event]] = {}  # the events of each instant, in order
        self._due: list[Event] = []  # the remaining events of the current instant, the next one last
        self._programs: list[Program] = []
        self._by_worker: dict[int, list[Program]] = {}
        self._num_main = 0  # main programs that have not ended
        self._hub = getcurrent()
        self._idle_greenlets: list[greenlet] = []  # for serving programs, with nothing to do
        self.has_ended = False  # whether programs that are not over are being cut off
        self._cut = False
        self._runs_torch = runs_torch
        self._let_others_run = outside(self._switch_with_torch if runs_torch else self._switch)
        self.time_s = self._now  # one object, which thousands of clocks share
        self.on_resume: Callable[[int], None] | None = None  # called with the worker that is about to run

    def _now(self) -> float:
        return self.now_s + self.current.ahead_s

    # What programs call

    def sleep(self, duration_s: float) -> None:
        current = self.current
        at_s = self.now_s + (current.ahead_s + duration_s)
        current.ahead_s = 0.0
        if self.has_ended:
            raise GreenletExit
        instants = self._instants
        if not self._due and (not instants or at_s < instants[0]):
            self.now_s = at_s
            return
        planned = self._planned.get(at_s)  # inlined `call_at`
        if planned is None:
            self._planned[at_s] = [current]
            heappush(instants, at_s)
        else:
            planned.append(current)
        self._let_others_run()

    def take(self, duration_s: float) -> None:
        """Lets the current program run ahead of the clock by this much more; its next `sleep` catches up.

        Saves a hand-over where the difference is invisible: effects that others see must happen when the clock gets there.
        """
        self.current.ahead_s += duration_s

    def catch_up(self) -> None:
        """Waits for the clock if the program is ahead of it; call it before waiting for others."""
        if self.current.ahead_s:
            self.sleep(0.0)

    def wait(self, what: str) -> None:
        """Waits until `wake` is called for this program; `what` appears in the error if that never happens."""
        if self.has_ended:
            raise GreenletExit
        self.current.waits_for = what
        self._let_others_run()

    def wake(self, program: Program, after_s: float = 0.0) -> None:
        self.call_at(self.now_s + after_s, program)

    def call_at(self, at_s: float, what: Event) -> None:
        """Plans a function called outside any program (it must not wait), a program to resume, or an arrival."""
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
        """Ends the simulation at once; unlike `stop` it may be called at any point, for example by a signal handler."""
        self._cut = self.has_ended = True

    def stop_at(self, at_s: float) -> None:
        """Ends the simulation at `at_s` if events remain; earlier deadlocks still count."""
        self.call_at(at_s, lambda: self.stop() if self._due or self._instants else None)

    # What runs them

    def start(self, worker_id: int, body: Callable[[], object], *, is_main: bool = True, server: str = "") -> Program:
        """Adds a program that begins now; the simulation ends with the last main one. `server` is its name in messages."""
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
        """Adds a program that calls `serve` now and whenever it is woken; `finish` ends it."""
        program = Program(worker_id, is_main=False)
        program.serve = serve
        self._add(program)
        return program

    def finish(self, program: Program) -> None:
        """Ends a serving program; programs that wait for its end resume."""
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
        """Ends all programs of a worker where they are; only for functions given to `call_at`."""
        ended, self.has_ended = self.has_ended, True  # a program that waits while it is being ended, ends there
        for program in self._by_worker.get(worker_id, ()):
            if not program.over:
                self._throw(program)
                self._finished(program)  # where it had not begun
        self.has_ended = ended or self._cut or not self._num_main

    def run(self) -> None:
        """Runs until all main programs have ended, or `stop`.

        Raises:
            ProgramError: a program raised an exception; the others are cut off at that instant.
            DeadlockError: every remaining program waits for another.
        """
        self._hub = getcurrent()
        gradients = torch.is_grad_enabled()  # shared by a thread's greenlets; a program that is cut off leaves its own
        for program in self._programs:
            if program.serve is None:
                program.greenlet.parent = self._hub
        try:
            what = self._next_event()
            while what is not None and not self.has_ended:
                if isinstance(what, Program):
                    what = self._resume(what)
                else:
                    what()
                    what = None
                if what is None and not self.has_ended:
                    what = self._next_event()
            if not self.has_ended and not all(program.over for program in self._programs):
                raise DeadlockError(self._programs, self.now_s)
        finally:
            self._cut_off()
            torch.set_grad_enabled(gradients)

    def _next_event(self) -> Program | Callable[[], None] | None:
        """Takes the next event, or None. Items that arrive are delivered here."""
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
        """Runs a program, from the hub; returns the hub's next event, or None if it is not known."""
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
            # `current` may have changed: programs hand over to each other.
            raise ProgramError(self.current, error, self.now_s) from error

    def _finished(self, program: Program) -> None:
        if program.over:
            return
        self.finish(program)
        if program.is_main:
            self._num_main -= 1
            if not self._num_main:
                self.has_ended = True

    def _call(self, program: Program) -> None:
        """Runs serving programs, one after the other; the body of an idle greenlet."""
        me = getcurrent()
        while True:
            assert program.serve is not None
            if self._runs_torch:
                torch.set_grad_enabled(False)  # per thread; the previous program may have changed it
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
        what = self._next_event()
        if what is self.current:
            return
        if self.on_resume is None and isinstance(what, Program) and (here := what.here) is not None:
            self.current = what
            here.switch(what)  # the common case of `_hand_over`, inlined
        else:
            self._hand_over(what)

    def _hand_over(self, what: Program | Callable[[], None] | None) -> Program:
        """Hands over to an event; returns the program to run once another greenlet switches back to the caller's."""
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
        if graph_task() != -1:
            # Switching greenlets inside backward hung or crashed PyTorch in trials: its engine keeps state per thread.
            raise RuntimeError("A simulated worker may not wait inside backward; wait before or after it.")
        gradients = torch.is_grad_enabled()
        self.current.here = getcurrent()
        self._switch()
        if torch.is_grad_enabled() is not gradients:
            torch.set_grad_enabled(gradients)

    def _end(self) -> None:
        self.has_ended = True

    def _throw(self, program: Program) -> None:
        self.current = program
        if program.serve is None:
            program.greenlet.throw(GreenletExit)
        elif program.here is not None:
            program.here.throw(GreenletExit)

    def _cut_off(self) -> None:
        """Ends unfinished programs; a program that waits while it is being ended, ends there."""
        self.has_ended = True
        for program in self._programs:
            if not program.over:
                self._throw(program)
            program.serve = None  # it refers to the program
        while self._idle_greenlets:
            self._idle_greenlets.pop().throw(GreenletExit)
