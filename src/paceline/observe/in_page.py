"""A run in a notebook cell: the live table, then the headline, the loss curve and the table of figures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.text import Text

from paceline.observe.compare import headline
from paceline.observe.document import markup
from paceline.observe.drawing import thin
from paceline.observe.progress import Progress, render
from paceline.observe.report import runs_and_notes
from paceline.observe.words import number_text, seconds_text
from paceline.records.run_data import RunData
from paceline.records.summary import WINDOW, loss_curve

_COLUMNS = 100
_WIDTH, _HEIGHT, _MARGIN = 640, 220, 34
_MAX_POINTS = 400


def progress_html(progress: Progress, title: str = "", messages: Sequence[str] = ()) -> str:
    """The messages and the live table as HTML."""
    console = Console(file=io.StringIO(), record=True, width=_COLUMNS, force_jupyter=False, highlight=False)
    console.print(Group(*map(Text, messages), render(progress, title)))
    frame = '<pre style="line-height: normal; white-space: pre; overflow-x: auto">{code}</pre>'
    return console.export_html(inline_styles=True, code_format=frame)


def run_html(run: RunData) -> str:
    """The headline, the curve of the training loss, and the table of figures, as HTML without scripts."""
    result = {**run.config, **run.result}
    return markup("observe/cell.html", headline=headline([result]), curve=_curve(run), **runs_and_notes([result]))


def _curve(run: RunData) -> dict[str, Any]:
    """The running loss over time, as points of a line; empty without losses."""
    curve = loss_curve(run.records, gossip=bool(run.result.get("gossip")))
    usable = np.isfinite(curve.average)
    time_s, loss = curve.time_s[usable], curve.average[usable]
    if len(loss) < 2:
        return {}
    kept = thin(len(loss), _MAX_POINTS)
    time_s, loss = time_s[kept], loss[kept]
    most_s, highest = float(time_s.max()) or 1.0, float(loss.max()) or 1.0
    x = _MARGIN + (_WIDTH - 2 * _MARGIN) * time_s / most_s
    y = _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * loss / highest
    points = " ".join(f"{across:.1f},{down:.1f}" for across, down in zip(x, y, strict=True))
    return {"points": points, "highest": number_text(highest), "last": seconds_text(most_s), "window": WINDOW}
