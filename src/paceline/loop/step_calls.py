"""From where, and how, a loop may call its optimizer's `step`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.errors import UsageError

__all__ = ["check_step_call", "is_in_backward"]

_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # -1: none


def is_in_backward() -> bool:
    """Whether this is called by a backward pass, as hooks of gradients are, and what was checkpointed as it is recomputed."""
    return _graph_task() >= 0


def check_step_call() -> None:
    """Refuses steps that have not one whole gradient.

    Raises:
        UsageError: the step is made within a backward pass.
    """
    if _graph_task() >= 0:
        raise UsageError(
            "The loop calls step() inside backward, as hooks that step each parameter by itself do; attach needs the whole"
            " gradient before a step: call step() after backward(), of one optimizer with all parameters."
        )
