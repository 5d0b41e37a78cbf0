"""Ctrl-C and SIGTERM: the first signal ends a run cleanly; the second ends the process at once.

A run notes the first signal and ends normally: it writes parameters, records and result, and then raises the signal.
SIGTERM, by which Slurm, Kubernetes and others announce a time limit, is treated like Ctrl-C. Must stay quick to import: the
command line installs its handlers before it loads anything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_IMPORTS = "<frozen importlib"
_SAME_S = 3.0  # a launcher and its agent may both send SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C.

    Attributes:
        is_left_to_system: whether the program has no handler of its own, so that SIGTERM should end it.
    """

    is_left_to_system = False


class Interruption:
    """Whether a signal has come."""

    def __init__(self) -> None:
        self.signum = 0
        self._calls: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return self.signum != 0

    @property
    def name(self) -> str:
        return "SIGTERM" if self.signum == signal.SIGTERM else "Ctrl-C"

    def note(self, signum: int) -> None:
        self.signum = signum
        for call in self._calls:
            call()

    def raise_if_any(self) -> None:
        if self.signum:
            raise Terminated if self.signum == signal.SIGTERM else KeyboardInterrupt

    @contextlib.contextmanager
    def calls(self, call: Callable[[], object]) -> Iterator[None]:
        """Makes a signal also call `call`, which must be safe between any two steps of the program."""
        self._calls.append(call)
        if self.signum:
            call()
        try:
            yield
        finally:
            self._calls.remove(call)


class DeferredTermination(Interruption):
    """Notes the first SIGTERM from `begin` to `end`, which then ends the process by it; another one after 3 s ends it at once.

    Does nothing if the program has a handler of its own, or in other threads than the main one, which cannot set any.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_begun = False
        self._noted_s = 0.0

    def begin(self) -> None:
        """Notes SIGTERM from now on; further calls do nothing."""
        if self._is_begun or threading.current_thread() is not threading.main_thread():
            return
        self._is_begun = True
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self:
            self._noted_s = now_s
            self.note(signum)
        elif now_s > self._noted_s + _SAME_S:
            self.end()

    def end(self) -> None:
        """Leaves SIGTERM to the system again, which ends the process if one has come."""
        if self._is_begun and signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self:
            os.kill(os.getpid(), signal.SIGTERM)


_current: Interruption | None = None  # of the run that is going on in the main thread


@contextlib.contextmanager
def noted(*, patient: bool = False) -> Iterator[Interruption]:
    """Notes the first signal inside, and raises it as `KeyboardInterrupt` at the end; the second ends the process at once.

    With `patient`, further SIGTERMs are ignored: if all processes of a job get one, this one's parent may send another.

    Inside another `noted`, and in other threads, yields the outer interruption. The program's own handlers stay, and then
    nothing is noted. If the program leaves SIGTERM to the system, SIGTERM ends it at the end of `ended_by_system`.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        interruption = noted_by()
        yield interruption
        interruption.raise_if_any()
        return
    interruption = Interruption()
    before = {one: signal.getsignal(one) for one in _SIGNALS}
    ours = [one for one in _SIGNALS if before[one] in (signal.default_int_handler, signal.SIG_DFL, _interrupt)]

    def note(signum: int, frame: FrameType | None) -> None:
        for one in ours:
            signal.signal(one, _pass if patient and one == signal.SIGTERM else signal.SIG_DFL)
        interruption.note(signum)

    for one in ours:
        signal.signal(one, note)
    _current = interruption
    try:
        try:
            yield interruption
            interruption.raise_if_any()
        except Terminated as error:
            error.is_left_to_system = before[signal.SIGTERM] == signal.SIG_DFL
            raise
    finally:
        _current = None
        for one in ours:  # the command line prints one more sentence, without interruption
            signal.signal(one, signal.SIG_DFL if interruption and before[one] is _interrupt else before[one])


@contextlib.contextmanager
def ended_by_system() -> Iterator[None]:
    """Sends SIGTERM to this program again after `noted` and the cleanup, if the program has no handler of its own."""
    try:
        yield
    except Terminated as error:
        if error.is_left_to_system:
            os.kill(os.getpid(), signal.SIGTERM)
        raise


def noted_by() -> Interruption:
    """The interruption of the current run."""
    return Interruption() if _current is None else _current


def install() -> None:
    """Installs the command line's handlers; a signal that the command was started to ignore stays ignored."""
    for one in _SIGNALS:
        if signal.getsignal(one) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(one, _interrupt)


def uninstall() -> None:
    """Makes signals end the process silently from here on, since all output is written."""
    for one in _SIGNALS:
        if signal.getsignal(one) is _interrupt:
            signal.signal(one, signal.SIG_DFL)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    uninstall()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTS):  # an exception may get lost there, or come out as a traceback
            _end_at_once(signum)
        frame = frame.f_back
    raise Terminated if signum == signal.SIGTERM else KeyboardInterrupt


def _end_at_once(signum: int) -> None:
    os.write(2, b"paceline: Stopped.\n")
    os._exit(128 + signum)


def leave_to_supervisor() -> None:
    """Leaves signals to a whole process group or job to the supervisor; for workers' processes and those that start them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _pass)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _pass(signum: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN, this is not inherited by other programs."""


_masks = threading.local()


def _hold_back() -> None:
    """Before a fork: a signal to the child must not find this process's handlers, which would lose it."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _hear_again() -> None:
    """Restores default handlers in a forked process, as loaders and pools end their processes by signals."""
    global _current
    _current = None
    for one, default in zip(_SIGNALS, (signal.default_int_handler, signal.SIG_DFL), strict=True):
        if getattr(signal.getsignal(one), "__module__", None) == __name__:
            signal.signal(one, default)
    _let_through()


os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_hear_again)


def exit_code(error: BaseException | None) -> int:
    """The exit code of a command that a signal has ended: 143 after SIGTERM, 130 after Ctrl-C."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
