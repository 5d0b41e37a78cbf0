"""Find a task by name, or in a user's file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import UsageError
from paceline.spec_text import closest
from paceline.tasks.base import Task

__all__ = ["BUILT_IN", "load_task"]

# Imported when asked for: scikit-learn alone takes a second.
BUILT_IN = {
    "digits-mlp": "paceline.tasks.digits_mlp:digits_mlp",
    "mnist-mlp": "paceline.tasks.mnist_mlp:mnist_mlp",
    "mnist-cnn": "paceline.tasks.mnist_cnn:mnist_cnn",
    "cifar10-cnn": "paceline.tasks.cifar10_cnn:cifar10_cnn",
}


def load_task(reference: str) -> Task:
    """Load a built-in task by name, or the task that a function in a file returns.

    The file is run like any Python file; its folder is appended to `sys.path`, so that it may import its neighbours.

    Args:
        reference: `digits-mlp`, or `path/to/file.py:function`.

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
    module = _import_file(path)
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [name for name, one in vars(module).items() if getattr(one, "__module__", None) == module.__name__]
        found = f"it defines {', '.join(own)}" if own else "it defines none"
        raise UsageError(f"{path} has no function '{function_name}'; {found}.")
    task = _run(path, f"Function '{function_name}' of {path}", function)
    if not isinstance(task, Task):
        what = type(task).__name__
        raise UsageError(f"Function '{function_name}' of {path} returned {what}; it must return a paceline Task.")
    return task


def _import_file(path: Path) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise UsageError(f"Task file {path} {why}; check the path in --task path/to/file.py:function.") from error
    # The name changes with the content: an edited file is run again, an unchanged one keeps its classes, for pickle.
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\0" + source).hexdigest()[:16]
    name = f"paceline_task_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"Task file {path} cannot be imported as Python; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module
    try:
        _run(path, f"Task file {path}", lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    except UsageError:
        del sys.modules[name]
        raise
    return module


def _run(path: Path, what: str, function: Callable[[], Any]) -> Any:
    """Call user code; what it raises becomes one sentence with the exception's last line and the user's line number."""
    try:
        return function()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        last_line = traceback.format_exception_only(error)[-1].strip()
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        at = f" at line {line}" if line else ""
        raise UsageError(f"{what} failed{at}: {last_line}") from error
