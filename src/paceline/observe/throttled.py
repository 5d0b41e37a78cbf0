"""Progress shown at most every few seconds, and always at the end."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from paceline.observe.progress import Progress

__all__ = ["Throttled"]


class Throttled(ABC):
    """Shows progress at most once in `every_s` seconds, and the last one at the end of its `with` block."""

    def __init__(self, every_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now_s = now_s
        self._shown_s = -math.inf
        self._last: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._show_last()

    def update(self, progress: Progress) -> None:
        """Show `progress` if `every_s` seconds have passed."""
        self._last = progress
        if self._now_s() - self._shown_s >= self._every_s:
            self._shown_s = self._now_s()
            self._show(progress)

    def _show_last(self) -> None:
        if self._last is not None:
            self._show(self._last)

    @abstractmethod
    def _show(self, progress: Progress) -> None: ...
