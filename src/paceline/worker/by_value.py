"""Sends functions that other processes cannot import, such as a notebook's, by value, with cloudpickle."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

from paceline.errors import UsageError


def pickled_function(function: Callable[[], Any]) -> bytes:
    """The function as bytes: by name if a process can import it, else by value, with the globals that it uses.

    Raises:
        UsageError: it must be sent by value, and cloudpickle is not installed.
    """
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) is not None or getattr(main, "__spec__", None) is not None:
        return pickle.dumps(function)  # other processes can import the main module, too
    written = io.BytesIO()
    try:
        _ByName(written).dump(function)
    except _OnlyHereError:
        try:
            import cloudpickle  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UsageError(
                "The function to train is defined in a notebook or at a prompt, from which worker processes cannot import "
                "it: pip install 'paceline[notebook]', which sends it by value; or define it in a file, or use "
                "backend='threads'."
            ) from error
        return cloudpickle.dumps(function)
    return written.getvalue()


class _OnlyHereError(Exception):
    """Something is defined in the main module."""


class _ByName(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Called for each function, class and instance."""
        if getattr(obj, "__module__", None) == "__main__":
            raise _OnlyHereError
        return NotImplemented
