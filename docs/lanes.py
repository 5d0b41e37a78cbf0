"""Worker lanes as a picture: a static SVG for documentation, light or dark, without fonts or scripts of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from paceline.observe.compare import run_labels
from paceline.observe.palette import ACTIVITIES, ACTIVITY_NAMES, SURFACES
from paceline.observe.segments import KINDS, segments, steady_start_s, steady_window_s
from paceline.observe.words import percent_text
from paceline.records.run_data import RunData

__all__ = ["lanes_svg"]

_WIDTH, _LEFT, _RIGHT = 880, 148, 24
_ROW, _BAR = 25, 18
_SLOW_RATIO = 1.8  # a worker whose gradients take so many times the others' is named as slow
_FONT = "Inter, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"


def lanes_svg(
    runs: Sequence[RunData], *, duration_s: float | None = None, steps: int | None = None, dark: bool = False
) -> str:
    """Draw one lane per worker over the same duration of every run, from when all workers have done their first step.

    The picture has an opaque background, so it is legible wherever it is shown; `dark=True` is for `<picture>`.

    Args:
        runs: usually one or two.
        duration_s: how much of each run to show.
        steps: instead: about so many steps of the fastest worker; 20 if neither is given.
        dark: colours for dark pages.

    Returns:
        The text of an SVG file.
    """
    surface = SURFACES["dark" if dark else "light"]
    colours = ACTIVITIES["dark" if dark else "light"]
    records = [run.records for run in runs]
    window_s = duration_s if duration_s is not None else steady_window_s(records, 20 if steps is None else steps)
    window_s = window_s if window_s > 0 else 1.0
    per_second = (_WIDTH - _LEFT - _RIGHT) / window_s
    scale, unit = (1e3, "ms") if window_s < 2 else (1.0, "s")

    body: list[str] = []
    y, dropped_shown = 62, False
    for run, label in zip(runs, run_labels([{**run.config, **run.result} for run in runs]), strict=True):
        begin_s = steady_start_s(run.records)
        y += 20
        lanes: list[str] = []
        slow = _slow_workers(run)
        applied = 0
        first_lane_y = y + 10
        for index, (worker_id, own) in enumerate(sorted(run.records.items())):
            top = first_lane_y + index * _ROW
            name = f"worker {worker_id}" + (
                f", {slow[worker_id]:.0f}\N{MULTIPLICATION SIGN} slower" if worker_id in slow else ""
            )
            lanes.append(_text(_LEFT - 10, top + 13.5, name, surface["text"], anchor="end", size=12.5))
            seen = own[(own["ended_s"] > begin_s) & (own["started_s"] < begin_s + window_s)]
            applied += int(((seen["applied_version"] >= 1) & (seen["ended_s"] <= begin_s + window_s)).sum())
            lane = segments(seen)
            for kind, start, end, step in zip(lane.kind, lane.start_s, lane.end_s, lane.rows, strict=True):
                low, high = max(start - begin_s, 0.0), min(end - begin_s, window_s)
                if high <= low:
                    continue
                lost = step["applied_version"] == -1 and KINDS[kind] == "gradient"
                dropped_shown = dropped_shown or lost
                x, width = _LEFT + low * per_second, (high - low) * per_second
                gap = 0.5 if width > 3 else 0.0
                lanes.append(
                    f'<rect x="{x:.2f}" y="{top}" width="{max(width - gap, 0.2):.2f}" height="{_BAR}" '
                    + (f'fill="url(#lost)" stroke="{colours["gradient"]}" stroke-width="0.8"' if lost else
                       f'fill="{colours[KINDS[kind]]}"')
                    + "/>"
                )  # fmt: skip
        y = first_lane_y + len(run.records) * _ROW
        body.extend(_grid(first_lane_y - 4, y - _ROW + _BAR + 4, window_s * scale, surface))
        share = run.result.get("waiting_share")
        said = f"{applied:,} gradients applied in {window_s * scale:,.0f} {unit}" + (
            f", {percent_text(share)} of the time spent waiting" if isinstance(share, float) else ""
        )
        body.append(_text(24, first_lane_y - 10, label, surface["text"], size=15, weight=650))
        body.append(_text(_WIDTH - _RIGHT, first_lane_y - 10, said, surface["soft"], anchor="end", size=13))
        body.extend(lanes)
        y += 14
    axis = _axis(y - 8, window_s * scale, unit, surface)
    height = y + 42
    legend = _legend(colours, surface, lost=dropped_shown)
    title = escape(" and ".join(str(run.result.get("algorithm", "run")) for run in runs))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" role="img" aria-label="What each worker did when: {title}" font-family="{_FONT}">',
            f"<title>What each worker did when: {title}</title>",
            '<defs><pattern id="lost" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="5" height="5" fill="{surface["page"]}"/>'
            f'<rect width="2" height="5" fill="{colours["gradient"]}"/></pattern></defs>',
            f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="10" fill="{surface["page"]}" '
            f'stroke="{surface["line"]}"/>',
            *legend,
            '<g shape-rendering="geometricPrecision">',
            *body,
            "</g>",
            *axis,
            "</svg>\n",
        ]
    )


def _text(
    x: float, y: float, text: str, colour: str, *, anchor: str = "start", size: float = 12, weight: int = 400
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size:g}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _slow_workers(run: RunData) -> dict[int, float]:
    """How many times longer than the typical worker's a slow worker's gradients take."""
    medians = {
        worker_id: float(np.median(own["gradient_ended_s"] - own["gradient_started_s"]))
        for worker_id, own in run.records.items()
        if len(own)
    }
    typical = float(np.median(list(medians.values()))) if len(medians) > 1 else 0.0
    if typical <= 0:
        return {}
    return {worker_id: one / typical for worker_id, one in medians.items() if one > _SLOW_RATIO * typical}


def _legend(colours: dict[str, str], surface: dict[str, str], *, lost: bool) -> list[str]:
    entries = [(ACTIVITY_NAMES[kind], colours[kind]) for kind in ("gradient", "wait", "apply", "input")]
    if lost:
        entries.append(("gradient dropped", "url(#lost)"))
    parts, x = [], 24.0
    for name, fill in entries:
        stroke = f' stroke="{colours["gradient"]}" stroke-width="0.8"' if fill.startswith("url") else ""
        parts.append(f'<rect x="{x:g}" y="21" width="13" height="13" rx="2" fill="{fill}"{stroke}/>')
        parts.append(_text(x + 19, 32, name, surface["soft"], size=13))
        x += 19 + 6.9 * len(name) + 22
    return parts


def _tick_step(length: float) -> float:
    step = 10.0 ** math.floor(math.log10(length / 4))
    return step * next(factor for factor in (1, 2, 5, 10) if length / (step * factor) <= 8)


def _ticks(length: float) -> list[tuple[float, float]]:
    """Values and their places in pixels."""
    step = _tick_step(length)
    per_unit = (_WIDTH - _LEFT - _RIGHT) / length
    return [
        (index * step, round(_LEFT + index * step * per_unit, 2))
        for index in range(int(length / step * (1 + 1e-9)) + 1)
    ]


def _grid(top: float, bottom: float, length: float, surface: dict[str, str]) -> list[str]:
    return [
        f'<line x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{bottom:g}" stroke="{surface["grid"]}"/>'
        for _, x in _ticks(length)
    ]


def _axis(y: float, length: float, unit: str, surface: dict[str, str]) -> list[str]:
    parts = [_text(x, y + 17, f"{value:,g}", surface["soft"], anchor="middle") for value, x in _ticks(length)]
    middle = (_WIDTH + _LEFT - _RIGHT) / 2
    parts.append(_text(middle, y + 36, f"time ({unit})", surface["soft"], anchor="middle", size=12.5))
    parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="{surface["line"]}"/>')
    return parts
