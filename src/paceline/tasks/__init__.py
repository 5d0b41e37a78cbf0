"""Tasks: model, loss, data and evaluation, as functions that any backend runs."""

from __future__ import annotations

from paceline.tasks.base import Task, evaluate, fetch, targets_of
from paceline.tasks.load import BUILT_IN, load_task

__all__ = ["BUILT_IN", "Task", "evaluate", "fetch", "load_task", "targets_of"]
