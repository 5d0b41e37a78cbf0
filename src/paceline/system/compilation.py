"""Compiles kernels with Numba, and keeps them in its cache on disk if there is a folder for it."""

from __future__ import annotations

import contextlib
from typing import Any

import numba
from numba.core import config
from numba.core.caching import FunctionCache

from paceline.errors import UsageError

if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
    raise UsageError("NUMBA_DISABLE_JIT is set, and Paceline's kernels work only when they are compiled: unset it.")


class _Cache(FunctionCache):
    """A cache that compiles the function again, instead of raising, if it is damaged or its disk is full."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with contextlib.suppress(Exception):
            return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(Exception):
            super().save_overload(sig, data)


def has_cache() -> bool:
    """Whether there is a folder for kernels."""
    try:
        _Cache(has_cache)
    except RuntimeError:
        return False
    return True


def compiled(function: Any, signature: str | None = None, *, cached: bool = True, **options: Any) -> Any:
    """Compiles a function with these `options` of `numba.njit`; only functions that a file defines can be `cached`.

    A `signature` in Numba's notation, such as `"int64(int64)"`, compiles now, for these types only; None: at the first call.
    Each process compiles if no folder for the cache can be written, as in a read-only installation without a home.
    """
    dispatcher: Any = numba.njit(**options)(function)
    if cached:
        with contextlib.suppress(RuntimeError):  # there is no folder for it
            dispatcher._cache = _Cache(function)  # what `cache=True` sets
    if signature is not None:
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    return dispatcher
