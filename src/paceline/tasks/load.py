"""Find a task by name, or in a user's file."""

from __future__ import annotations

import importlib
from pathlib import Path

from paceline.errors import UsageError
from paceline.specs.text import closest
from paceline.specs.user_file import load_function, run_user_code
from paceline.tasks.base import Task

# Imported when asked for: scikit-learn alone takes a second.
BUILT_IN = {
    "digits-mlp": "paceline.tasks.digits_mlp:digits_mlp",
    "mnist-mlp": "paceline.tasks.mnist:mnist_mlp",
    "mnist-cnn": "paceline.tasks.mnist:mnist_cnn",
    "cifar10-cnn": "paceline.tasks.cifar10_cnn:cifar10_cnn",
    "vgg-small": "paceline.tasks.vgg_small:vgg_small",
    "clicks": "paceline.tasks.clicks:clicks",
}


def load_task(reference: str) -> Task:
    """Load a built-in task by name, or the task that the function in `path/to/file.py:function` returns.

    The file runs like any Python file; its folder is appended to `sys.path`, so that it can import its neighbours.

    Raises:
        UsageError: no such task, or the file or function fails; the message names the line.
    """
    if reference in BUILT_IN:
        module_name, _, function_name = BUILT_IN[reference].partition(":")
        return getattr(importlib.import_module(module_name), function_name)()
    path_text, _, function_name = reference.rpartition(":")
    if not path_text.endswith(".py"):
        if reference.endswith(".py"):
            raise UsageError(f"Task '{reference}' names no function; write {reference}:function.")
        known = ", ".join(BUILT_IN)
        hint = closest(reference, BUILT_IN)
        raise UsageError(f"Unknown task '{reference}'.{hint} Known: {known}, or your own path/to/file.py:function.")
    path = Path(path_text)
    function = load_function(path, function_name, what="Task file", written="--task path/to/file.py:function")
    task = run_user_code(path, f"Function '{function_name}' of {path}", function)
    if not isinstance(task, Task):
        what = type(task).__name__
        raise UsageError(f"Function '{function_name}' of {path} returned {what}; it must return a paceline Task.")
    return task
