"""Errors that nobody catches: those that say what to do end the process with just that."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from paceline.errors import PacelineError, UsageError

__all__ = ["SaidAlone"]


class SaidAlone:
    """From here to its `close`, an uncaught error of Paceline's is printed without a traceback, as on the command line."""

    def __init__(self) -> None:
        self._before = sys.excepthook
        self._last: weakref.ref[BaseException] | None = None
        sys.excepthook = self._hook

    def close(self) -> None:
        """The error that is on its way now, if one is, is the last one; once it is gone, all is as before."""
        error = sys.exc_info()[1]
        if isinstance(error, PacelineError):
            self._last = weakref.ref(error, self._restore)
        else:
            self._restore()

    def _restore(self, *_: Any) -> None:
        if sys.excepthook == self._hook:
            sys.excepthook = self._before

    def _hook(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, PacelineError) or (self._last is not None and self._last() is not error):
            self._before(kind, error, trace)
            return
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2 if isinstance(error, UsageError) else 1)
