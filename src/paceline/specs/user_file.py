"""Loads functions from users' files by `path/to/file.py:function`, with one-sentence errors."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import UsageError, first_line

_OURS = Path(__file__).parents[1]


def load_function(path: Path, name: str, *, what: str, written: str) -> Callable[..., Any]:
    """The function `name` of a file, which is run like any Python file; its folder is appended to `sys.path`.

    Messages begin with `what`, the file's kind, and say how a reference is `written`.

    Raises:
        UsageError: no such file or function, or the file fails; the message names the line.
    """
    module = _import_file(path, what, written)
    function = getattr(module, name, None)
    if not callable(function):
        own = [name for name, one in vars(module).items() if getattr(one, "__module__", None) == module.__name__]
        found = f"it defines {', '.join(own)}" if own else "it defines none"
        raise UsageError(f"{path} has no function '{name}'; {found}.")
    return function


def _import_file(path: Path, what: str, written: str) -> ModuleType:
    try:
        is_odd = path.exists() and not path.is_file()  # a pipe, say, which may never end
        source = b"" if is_odd else path.read_bytes()
    except (OSError, ValueError) as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({first_line(error)})"
        raise UsageError(f"{what} {path} {why}; check the path in {written}.") from error
    if is_odd:
        raise UsageError(f"{what} {path} is not a file; check the path in {written}.")
    # The name changes with the content: an edited file is run again, an unchanged one keeps its classes, for pickle.
    digest = hashlib.sha256(os.fsencode(path.resolve()) + b"\0" + source).hexdigest()[:16]
    name = f"paceline_user_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{what} {path} cannot be imported as Python; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module
    try:
        run_user_code(path, f"{what} {path}", lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    except UsageError:
        del sys.modules[name]
        raise
    return module


def run_user_code(path: Path | None, what: str, function: Callable[[], Any]) -> Any:
    """Calls a user's code; turns an exception into one sentence with its last line and the user's line number.

    The sentence begins with `what`, the operation. `path` is of the user's file; None: unknown.
    """
    try:
        return function()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        last_line = traceback.format_exception_only(error)[-1].strip()
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(Path(frame.filename), path)]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
        where = f" of {frames[-1].filename}" if path is None and frames else ""
        at = f" at line {line}{where}" if line else ""
        raise UsageError(f"{what} failed{at}: {last_line}") from error


def _is_users(file: Path, path: Path | None) -> bool:
    return _OURS not in file.parents if path is None else file.resolve() == path.resolve()
