"""A hook right after PyTorch's backward pass: a simulated worker must not wait inside the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from greenlet import getcurrent, greenlet

__all__ = ["AfterBackward"]

_autograd: Any = torch.autograd
# Every way into a backward pass of PyTorch ends here, even for code that has imported `backward` by name.
_ENTRY = "_engine_run_backward" if hasattr(_autograd, "_engine_run_backward") else "backward"
_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore  (-1 outside backward)


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
        """From inside a backward pass: has `what` called as soon as the pass has returned."""
        self._pending.append((getcurrent(), what))

    def __enter__(self) -> Self:
        """Wraps PyTorch's entry into backward passes."""
        original = self._original = getattr(_autograd, _ENTRY)

        def run_backward(*args: Any, **named: Any) -> Any:
            try:
                returned = original(*args, **named)
            except BaseException:
                self._take()
                raise
            if self._pending and _graph_task_id() == -1:
                for what in self._take():
                    what()
            return returned

        self._wrapped = run_backward
        setattr(_autograd, _ENTRY, run_backward)
        return self

    def __exit__(self, *exception: object) -> None:
        """Restores PyTorch's entry, unless other code has wrapped it since and has not restored ours."""
        if getattr(_autograd, _ENTRY) is self._wrapped:
            setattr(_autograd, _ENTRY, self._original)
        del self._wrapped

    def _take(self) -> list[Callable[[], None]]:
        me = getcurrent()
        mine = [what for maker, what in self._pending if maker is me]
        self._pending = [one for one in self._pending if one[0] is not me]
        return mine
