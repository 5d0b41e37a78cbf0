"""A hook right after PyTorch's backward pass: a simulated worker must not wait inside the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from greenlet import getcurrent, greenlet

from paceline.system.torch_internals import backward_entry, graph_task, set_backward_entry


class AfterBackward:
    """Within its `with` block, runs functions requested during a backward pass right after that has returned.

    A callback of the engine would run too early: inside the pass, where switching greenlets hung or crashed PyTorch. A
    nested pass, as in reentrant checkpointing, ends with the outer one. If a pass raises, nothing is called. Costs: a
    microsecond for every backward pass of the process.
    """

    def __init__(self) -> None:
        # By the greenlet that makes the pass, as other threads may have passes of their own at the same time.
        self._pending: list[tuple[greenlet, Callable[[], None]]] = []

    def call(self, what: Callable[[], None]) -> None:
        self._pending.append((getcurrent(), what))

    def __enter__(self) -> Self:
        original = self._original = backward_entry()

        def run_backward(*args: Any, **named: Any) -> Any:
            try:
                returned = original(*args, **named)
            except BaseException:
                self._take()
                raise
            if self._pending and graph_task() == -1:
                for what in self._take():
                    what()
            return returned

        self._wrapped = run_backward
        set_backward_entry(run_backward)
        return self

    def __exit__(self, *exception: object) -> None:
        """Restores PyTorch's entry, unless other code has wrapped it since and has not restored ours."""
        if backward_entry() is self._wrapped:
            set_backward_entry(self._original)
        del self._wrapped

    def _take(self) -> list[Callable[[], None]]:
        me = getcurrent()
        mine = [what for maker, what in self._pending if maker is me]
        self._pending = [one for one in self._pending if one[0] is not me]
        return mine
