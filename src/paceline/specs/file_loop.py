"""A user's training function, named by its file so that it can be sent to worker processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.specs.user_file import load_function

_WRITTEN = "path/to/file.py:function"


@dataclass(frozen=True)
class FileLoop:
    """A function in a file, which each worker process imports for itself."""

    path: Path  # of the file, absolute, since a worker may run in another folder
    function: str  # its name, which becomes the run's task name

    def __call__(self) -> Any:
        return self.load()()

    def load(self) -> Callable[[], Any]:
        """The function itself; runs the file unless this process has run it before."""
        return load_function(self.path, self.function, what="File", written=_WRITTEN)

    @property
    def __name__(self) -> str:
        return self.function


def is_loop(text: str) -> bool:
    """Whether the text has the form `path/to/file.py:function`, unlike a script's path.

    >>> is_loop("train.py:train"), is_loop("train.py")
    (True, False)
    """
    return text.rpartition(":")[0].endswith(".py")


def load_loop(reference: str) -> FileLoop:
    """The training function that `path/to/file.py:function` names, for `launch` and `simulate`.

    The file also runs here, like any Python file, so that its errors show before any worker starts.

    Raises:
        UsageError: no such file or function, the file fails, or the function needs arguments; the message names the line.
    """
    path_text, _, name = reference.rpartition(":")
    if not path_text.endswith(".py") or not name:
        hint = f"; write {reference.rstrip(':')}:function" if reference.rstrip(":").endswith(".py") else ""
        raise UsageError(f"'{reference}' does not name a training function in a file, such as {_WRITTEN}{hint}.")
    loop = FileLoop(Path(path_text).absolute(), name)
    function = load_function(Path(path_text), name, what="File", written=_WRITTEN)
    try:
        inspect.signature(function).bind()
    except ValueError:  # its signature is not available
        pass
    except TypeError as error:
        raise UsageError(
            f"Function '{name}' of {path_text} is called without arguments ({error}): give its parameters defaults."
        ) from error
    return loop
