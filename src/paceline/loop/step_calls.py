"""Where a loop may call its optimizer's `step`, and whether a backward pass is running."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from paceline.errors import UsageError

__all__ = ["call_after_backward", "graph_task", "is_in_backward", "refuse_step"]

graph_task: Callable[[], int] = torch._C._current_graph_task_id  # of the backward pass that calls; -1: none does
call_after_backward: Callable[[Callable[[], None]], None] = (  # within a backward pass: at its end
    torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore
)


def is_in_backward() -> bool:
    """Whether a backward pass is the caller, as for gradient hooks and activation recomputation."""
    return graph_task() >= 0


def refuse_step() -> NoReturn:
    """Refuses a step within a backward pass, whose gradient is incomplete.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "The loop calls step() inside backward, as hooks that step each parameter by itself do; attach needs the whole"
        " gradient before a step: call step() after backward(), of one optimizer with all parameters."
    )
