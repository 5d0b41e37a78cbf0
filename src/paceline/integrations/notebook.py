"""Runs in a notebook: progress in the training cell, and the outcome as a cell's result.

`pl.launch` takes functions defined in a notebook if the extra `paceline[notebook]` is installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.errors import UsageError
from paceline.observe.in_page import progress_html, run_html
from paceline.observe.progress import Progress, Throttled
from paceline.records.run_data import RunData

_EVERY_S = 0.25
_NO_NOTEBOOK = (
    "CellProgress shows a run's progress in a notebook's cell, but this is not a notebook: leave it out, or start the run with"
    " `paceline launch FILE.py:FUNCTION`, which shows it in the terminal."
)


class CellProgress(Throttled):
    """Shows a run's progress below the cell that it is used in, in a `with` block.

    The table is replaced in place, at most four times a second; a replacement costs a millisecond or two.

    Args:
        title: heads the table.
        now_s: for tests; a monotonic clock.

    >>> with CellProgress("hogwild, 2 workers") as progress:  # doctest: +SKIP
    ...     run = pl.launch(train, workers=2, on_progress=progress.update)
    """

    def __init__(self, title: str = "", *, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(_EVERY_S, now_s)
        self._title = title
        self._messages: list[str] = []
        self._cell = _cell()

    def update(self, progress: Progress) -> None:
        """Shows `progress`, unless the last update was too recent; its message is kept."""
        if progress.message:
            self._messages.append(progress.message)
        super().update(progress)

    def _show(self, progress: Progress) -> None:
        self._cell(progress_html(progress, self._title, self._messages))


class CellReport:
    """A run's outcome, as the last line of a cell: the answer, the curve of the loss, the table of figures.

    Not: the whole report, with staleness and worker timelines, which a run with `out=` writes into its folder.

    Args:
        run: from `launch`, `train`, `simulate` or a folder.
    """

    def __init__(self, run: RunData) -> None:
        self.run = run

    def _repr_html_(self) -> str:
        return run_html(self.run)

    def __repr__(self) -> str:
        result = self.run.result
        return (
            f"{result.get('task')}, {result.get('algorithm')}: {result.get('outcome')}, {result.get('steps')} updates"
        )


def _cell() -> Callable[[str], None]:
    """A function that shows HTML in this cell, replacing what it showed before."""
    try:
        from IPython.core.getipython import get_ipython  # pyright: ignore[reportMissingImports]
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(_NO_NOTEBOOK) from error
    if getattr(get_ipython(), "kernel", None) is None:
        raise UsageError(_NO_NOTEBOOK)
    handle: Any = None

    def show(html: str) -> None:
        nonlocal handle
        if handle is None:
            handle = display(HTML(html), display_id=True)
        else:
            handle.update(HTML(html))

    return show
