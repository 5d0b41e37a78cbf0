"""Figures as plain data for plotly.js; the page resolves names of colours such as `@method-0`."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.observe.palette import METHODS

_GAP_PX = 34  # above each panel, for its heading


@dataclass(slots=True)
class Figure:
    """One figure."""

    name: str  # its id and the name of downloaded files
    title: str
    note: str  # explains how to read it
    traces: list[dict[str, Any]]
    layout: dict[str, Any]  # plotly layout without colours, fonts and margins, which the page sets
    #: The figure as a table and as its CSV file: headings, then rows of texts and numbers.
    table: Sequence[Sequence[Any]] = ()
    #: Of the CSV file of a figure without a table: headings, and the keys of their values in the traces.
    columns: Mapping[str, str] = field(default_factory=dict)
    height_px: int = 380
    legend: bool = True


class Panels:
    """Panels below each other that share an x axis, each with a heading, and their traces."""

    def __init__(self, labels: Sequence[str], sizes: Sequence[float]) -> None:
        total = sum(sizes) + _GAP_PX * len(sizes)
        self.height_px = round(total)
        self.traces: list[dict[str, Any]] = []
        self.x: dict[str, Any] = {"anchor": "free", "position": 0}
        self.layout: dict[str, Any] = {"annotations": [], "shapes": [], "xaxis": self.x}
        self._in_legend: set[str] = set()
        top = total
        for index, (label, size) in enumerate(zip(labels, sizes, strict=True)):
            top -= _GAP_PX
            self.layout[f"yaxis{_number(index)}"] = {
                "domain": [max(0, (top - size) / total), top / total],
                "anchor": "x",
            }
            self.layout["annotations"].append(
                {
                    "text": f"<b>{html.escape(label, quote=False)}</b>", "showarrow": False, "xref": "paper", "yref": "paper",
                    "x": 0, "y": top / total, "xanchor": "left", "yanchor": "bottom", "font": {"size": 12.5, "color": "@text"},
                }
            )  # fmt: skip
            top -= size

    def y(self, panel: int, **settings: Any) -> None:
        self.layout[f"yaxis{_number(panel)}"] |= settings

    def rows(self, panel: int, names: Sequence[str]) -> None:
        """Name the rows of a panel of bars, the first at the top."""
        self.y(
            panel, type="category", categoryorder="array", categoryarray=names, tickvals=names,
            range=[len(names) - 0.5, -0.5], showgrid=False, ticks="",
        )  # fmt: skip

    def add(self, panel: int, *, legend: str | None = None, **trace: Any) -> None:
        """Add a trace to a panel; the first trace of each `legend` is listed in the figure's legend."""
        shown: dict[str, Any] = {"showlegend": legend is not None and legend not in self._in_legend}
        if legend is not None:
            self._in_legend.add(legend)
            shown["legendgroup"] = legend
        self.traces.append({**trace, "yaxis": axis_name(panel), **shown})

    def bars(self, panel: int, kind: str, name: str, names: Sequence[str], x: Any, **looks: Any) -> None:
        """Add one bar to each row; `kind` is their colour."""
        marker = {"color": f"@{kind}", "line": {"width": 0}, **looks.pop("marker", {})}
        self.add(
            panel, legend=kind, type="bar", orientation="h", name=name, width=0.8, y=names, x=numbers(x), marker=marker,
            **looks,
        )  # fmt: skip

    def figure(self, name: str, title: str, note: str, **more: Any) -> Figure:
        """The figure of all panels; arguments as those of `Figure`."""
        return Figure(name, title, note, self.traces, self.layout, height_px=self.height_px, **more)


def _number(panel: int) -> str:
    return str(panel + 1) if panel else ""


def axis_name(panel: int) -> str:
    """Plotly's name of a panel's y axis."""
    return f"y{_number(panel)}"


def method_colour(place: int) -> str:
    """The colour of the method at this index; there are eight."""
    return f"@method-{place % len(METHODS['light'])}"


def numbers(values: Any, digits: int = 6) -> list[float | None]:
    """Plain numbers for JSON, rounded to `digits` significant digits to keep the page small; None if not finite."""
    return [
        float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in np.asarray(values, float).tolist()
    ]


def scatter(mode: str, name: str, x: Any, y: Any, **looks: Any) -> dict[str, Any]:
    """A trace of points, lines, texts, or several of these."""
    return {"type": "scatter", "mode": mode, "name": name, "x": numbers(x), "y": numbers(y), **looks}


def thin(size: int, limit: int) -> np.ndarray:
    """At most `limit` evenly spaced indices of `size` values."""
    return np.unique(np.linspace(0, size - 1, min(size, limit)).astype(np.int64)) if size else np.arange(0)


def log_axis(low: float, high: float) -> dict[str, Any]:
    """Range and ticks at 1, 2, 5 of each decade (only decades if there are many), written out as numbers."""
    low, high = max(low * 0.75, 1e-15 * high), high * 1.3
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(decades) // 8)
    digits = (1, 2, 5) if len(decades) <= 4 else (1,)
    ticks = [digit * 10.0**decade for decade in decades[::every] for digit in digits]
    ticks = [tick for tick in ticks if low <= tick <= high]
    return {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }


def error_bars(value: float | Sequence[float], low: Any, high: Any, colour: str | None, **looks: Any) -> dict[str, Any]:
    """Intervals for `error_x` and `error_y`; an unknown end has no bar."""
    above, below = (
        np.nan_to_num(np.atleast_1d(one), posinf=0.0) for one in (np.subtract(high, value), np.subtract(value, low))
    )
    ends = {"array": numbers(above), "arrayminus": numbers(below)}
    return {"type": "data", "symmetric": False, **ends, "color": colour, **looks}


def add_rule(layout: dict[str, Any], text: str, *, x: float | None = None, y: float | None = None) -> None:
    """Add a dashed line with a label, horizontal at `y` or vertical at `x`."""
    along, across, at = ("x", "y", y) if y is not None else ("y", "x", x)
    ends = {f"{along}ref": "paper", f"{along}0": 0, f"{along}1": 1, f"{across}0": at, f"{across}1": at}
    layout.setdefault("shapes", []).append(dashed(text, **ends))


def dashed(text: str = "", **ends: Any) -> dict[str, Any]:
    """A dashed line between two points, with a label at its end."""
    label = {
        "text": text, "textposition": "end", "textangle": 0, "xanchor": "right",
        "yanchor": "top" if ends["x0"] == ends["x1"] else "bottom", "font": {"color": "@soft", "size": 11},
    }  # fmt: skip
    return {"type": "line", **ends, "line": {"color": "@soft", "width": 1, "dash": "dash"}, "label": label}
