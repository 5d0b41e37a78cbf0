"""A worker program as a greenlet beside the loop: one of the two runs at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet


class Program:
    """Switches between a program and the loop that started it.

    Not under `no_grad`, which would cost as much as all else that a hook does: the program touches no tensor that autograd
    follows.

    Attributes:
        resume: called by the loop: the program goes on until it waits.
        wait: called by the program: the loop goes on until it resumes the program.
    """

    def __init__(self) -> None:
        self._greenlet = greenlet(lambda: None)
        self.resume: Callable[[], Any] = self._greenlet.switch
        self.wait: Callable[[], Any] = self._greenlet.switch

    def start(self, run: Callable[[], None]) -> None:
        loop = getcurrent()
        self._greenlet = greenlet(run, parent=loop)
        self.resume, self.wait = self._greenlet.switch, loop.switch
        self.resume()

    @property
    def is_over(self) -> bool:
        return self._greenlet.dead

    def end_by(self, error: type[Exception]) -> None:
        self._greenlet.throw(error)

    def kill(self) -> None:
        self._greenlet.throw(GreenletExit)
