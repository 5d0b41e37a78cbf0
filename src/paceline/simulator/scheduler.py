"""Virtual time: worker programs run one at a time and hand over where they wait.

Every program is a greenlet, so plain blocking code needs no rewriting. The order of events depends on virtual times
and on nothing else: events of one instant happen in the order in which they were planned.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from heapq import heappop, heappush

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from paceline.errors import PacelineError

__all__ = ["DeadlockError", "Program", "ProgramError", "Scheduler"]

_NAMED_IN_DEADLOCK = 8

_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore  (-1 outside backward)


class DeadlockError(PacelineError):
    """Every program waits for another one: nothing can happen any more."""


class ProgramError(PacelineError):
    """A worker's program raised an exception, which is the cause of this one.

    Attributes:
        worker_id: the worker.
        cause: what its program raised.
    """

    def __init__(self, worker_id: int, cause: Exception, at_s: float) -> None:
        super().__init__(f"Worker {worker_id} failed at {at_s:.6g} s of virtual time: {type(cause).__name__}: {cause}")
        self.worker_id = worker_id
        self.cause = cause


class Program:
    """One program of a worker, as the scheduler keeps it.

    Attributes:
        is_main: whether it is the worker's `work`, and not a further program.
        joining: programs that wait for its end.
        over: whether it has ended.
        here: the greenlet that waits: the program's own, or one that it runs inside itself.
    """

    __slots__ = ("greenlet", "here", "is_main", "joining", "over", "waits_for", "worker_id")

    def __init__(self, worker_id: int, *, is_main: bool) -> None:
        self.worker_id = worker_id
        self.is_main = is_main
        self.waits_for = ""  # what it waits for without a time of its own: a lock, a barrier
        self.joining: list[Program] = []
        self.over = False
        self.greenlet: greenlet
        self.here: greenlet


class Scheduler:
    """Runs programs under a virtual clock.

    `sleep`, `wait` and `wake` are called by running programs, through the simulated ports. What PyTorch keeps per thread
    and a program may have changed (the gradient mode) is put back after each hand-over; random states are kept by
    the replicas, around the only code that draws from PyTorch's generator.
    Costs: a hand-over about 1 us, with thousands of programs some more; a wait of the only program at its instant, before
    anybody else's next, no hand-over at all.

    Args:
        runs_torch: whether programs may compute with PyTorch (otherwise hand-overs need not look after its state).

    Attributes:
        now_s: virtual time in seconds; the programs begin at 0.
        num_events: events so far.
    """

    def __init__(self, *, runs_torch: bool = True) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._runs_torch = runs_torch
        self._instants: list[float] = []  # a heap of the keys of `_planned`, but for the one that is being dealt with
        self._planned: dict[float, list[Program | Callable[[], None]]] = {}  # the events of each, in their order
        self._due: list[Program | Callable[[], None]] = []  # those of this instant, past ones included
        self._num_dealt_with = 0  # of these
        self._programs: list[Program] = []
        self._by_worker: dict[int, list[Program]] = {}
        self._num_main = 0  # main programs that have not ended
        self._hub = getcurrent()
        self._current: Program | None = None
        self._ended = False
        self.on_resume: Callable[[int], None] | None = None  # called with the worker that is about to run

    # What programs call

    @property
    def current(self) -> Program:
        """The program that is running."""
        assert self._current is not None, "only a simulated program can wait"
        return self._current

    def sleep(self, duration_s: float) -> None:
        """Goes on `duration_s` later."""
        at_s = self.now_s + duration_s
        if self._ended:
            raise GreenletExit
        if self._num_dealt_with == len(self._due):
            instants = self._instants
            if not instants or at_s < instants[0]:
                self.now_s = at_s
                return
        program = self._current
        assert program is not None, "only a simulated program can wait"
        self.call_at(at_s, program)
        if self._runs_torch:
            self._hand_over()
        else:
            self._switch()

    def wait(self, what: str) -> None:
        """Waits until `wake` is called for this program; `what` is for the message should that never happen."""
        program = self._current
        assert program is not None, "only a simulated program can wait"
        if self._ended:
            raise GreenletExit
        program.waits_for = what
        if self._runs_torch:
            self._hand_over()
        else:
            self._switch()

    def wake(self, program: Program, after_s: float = 0.0) -> None:
        """Lets a program that waits go on, `after_s` from now."""
        self.call_at(self.now_s + after_s, program)

    def call_at(self, at_s: float, what: Callable[[], None] | Program) -> None:
        """Calls a function at an instant, outside any program, where it must not wait; or lets a program that waits go on."""
        planned = self._planned.get(at_s)
        if planned is None:
            self._planned[at_s] = [what]
            heappush(self._instants, at_s)
        else:
            planned.append(what)

    def resume(self, program: Program) -> None:
        """Lets a program that waits go on at once: the last thing that a function of `call_at` does, outside any program."""
        if program.over:
            return  # its worker was ended meanwhile
        self._current = program
        try:
            if self.on_resume is not None:
                self.on_resume(program.worker_id)
            program.here.switch()
        except Exception as error:
            worker_id = self.current.worker_id  # another one by now, perhaps: programs hand over to each other
            raise ProgramError(worker_id, error, self.now_s) from error
        finally:
            self._current = None

    def stop(self) -> None:
        """Ends the simulation after the events planned for this instant; unfinished programs are cut off."""
        self.call_at(self.now_s, self._end)

    # What runs them

    def start(self, worker_id: int, body: Callable[[], object], *, is_main: bool = True) -> Program:
        """Adds a program that begins now; the simulation ends with the last main one."""
        program = Program(worker_id, is_main=is_main)

        def run() -> None:
            try:
                body()
            finally:
                self._finished(program)

        program.greenlet = greenlet(run, self._hub)
        program.greenlet.gr_context = contextvars.copy_context()
        program.here = program.greenlet
        self._num_main += is_main
        self._programs.append(program)
        self._by_worker.setdefault(worker_id, []).append(program)
        self.wake(program)
        return program

    def end_worker(self, worker_id: int) -> None:
        """Ends all programs of a worker where they are; for functions of `call_at` only."""
        ended, self._ended = self._ended, True  # a program that waits while it is being ended is ended there
        for program in self._by_worker.get(worker_id, ()):
            if not program.over:
                self._current = program
                program.greenlet.throw(GreenletExit)
                self._finished(program)  # where it had not begun
        self._current = None
        self._ended = ended or not self._num_main

    def run(self) -> None:
        """Runs until all main programs have ended, or `stop`.

        Raises:
            ProgramError: a program raised an exception; the others are cut off at that instant.
            DeadlockError: every program that is left waits for another.
        """
        instants, planned = self._instants, self._planned
        self._hub = getcurrent()
        for program in self._programs:
            program.greenlet.parent = self._hub
        try:
            while instants and not self._ended:
                at_s = self.now_s = heappop(instants)
                due = self._due = planned[at_s]  # which grows meanwhile
                self._num_dealt_with = 0
                while self._num_dealt_with < len(due) and not self._ended:
                    what = due[self._num_dealt_with]
                    self._num_dealt_with += 1
                    if isinstance(what, Program):
                        self.resume(what)
                    else:
                        what()
                self.num_events += self._num_dealt_with
                del planned[at_s]
            left = [program for program in self._programs if not program.greenlet.dead]
            if left and not self._ended:
                raise DeadlockError(self._deadlock(left))
        finally:
            self._cut_off()

    def _finished(self, program: Program) -> None:
        if program.over:
            return
        program.over = True
        for waiting in program.joining:
            self.wake(waiting)
        if program.is_main:
            self._num_main -= 1
            if not self._num_main:
                self._ended = True

    def _switch(self) -> None:
        """Lets others run: the program that is due next in this instant, or the hub, which deals with all else.

        The hub begins programs, too: a greenlet goes on counting the depth of recursion from where it was begun.
        """
        if self._num_dealt_with < len(self._due):
            following = self._due[self._num_dealt_with]
            if isinstance(following, Program) and following.greenlet and not following.over and not self._ended:
                self._num_dealt_with += 1
                self._current = following
                if self.on_resume is not None:
                    self.on_resume(following.worker_id)
                following.here.switch()
                return
        self._hub.switch()

    def _hand_over(self) -> None:
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

    def _cut_off(self) -> None:
        """Ends what is unfinished; a program that waits while it is being ended is ended there."""
        self._ended = True
        gradients = torch.is_grad_enabled()
        for program in self._programs:
            if not program.greenlet.dead:
                self._current = program
                program.greenlet.throw(GreenletExit)
        self._current = None
        torch.set_grad_enabled(gradients)

    def _deadlock(self, left: list[Program]) -> str:
        said = [f"worker {one.worker_id} waits for {one.waits_for}" for one in left[:_NAMED_IN_DEADLOCK]]
        if len(left) > _NAMED_IN_DEADLOCK:
            said.append(f"so do {len(left) - _NAMED_IN_DEADLOCK} more workers")
        ended = [str(one.worker_id) for one in self._programs if one.greenlet.dead][:_NAMED_IN_DEADLOCK]
        ends = f" (ended already: {', '.join(ended)})" if ended else ""
        return f"Deadlock at {self.now_s:.6g} s of virtual time: {'; '.join(said)}{ends}."
