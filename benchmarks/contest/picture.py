"""The head to head as a picture: accuracy against time, a panel per scene and a line per method; a static SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from contest.methods import ALONE, METHODS, SILENT, WITHOUT
from contest.tables import SCENES, Record, lead, median_run, of
from paceline.observe.palette import METHODS as COLOURS
from paceline.observe.palette import SURFACES

WIDTH, PANEL_HEIGHT = 880, 210
LEFT, RIGHT, TOP, GAP = 56, 24, 64, 62
FONT = "Inter, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
# Ours in colours, unbroken; others broken, so that the two are told apart in grey.
DASHES = {"Paceline": "", "PyTorch": "7 4", "torchft": "2 3", "hivemind": "10 3 2 3"}
CONTROLS = {ALONE: "", SILENT: "2 3", WITHOUT: "7 4"}  # in grey
LOWEST, HIGHEST = 0.85, 1.0


def pictures(records: Sequence[Record], target: float) -> dict[str, str]:
    """An SVG for light pages and one for dark pages: where workers are not alike, once ours and others have run there."""
    scenes = [scene for scene in SCENES if scene != "none" and lead(records, scene) is not None]
    methods = [name for name in METHODS if any(of(records, scene=scene, method=name) for scene in scenes)]
    return {theme: picture(records, scenes, methods, target, dark=theme == "dark") for theme in ("light", "dark")}


def picture(
    records: Sequence[Record], scenes: Sequence[str], methods: Sequence[str], target: float, *, dark: bool
) -> str:
    """The text of an SVG file; opaque, so that it is legible wherever it is shown."""
    theme = "dark" if dark else "light"
    surface = SURFACES[theme]
    own = {name: method.colour for name, method in METHODS.items()}
    colours = {name: surface["text"] if one is None else COLOURS[theme][one] for name, one in own.items()}
    colours |= dict.fromkeys(CONTROLS, surface["soft"])
    body, y = _legend(methods, colours, surface)
    for scene in scenes:
        runs = {name: run for name in methods if (run := median_run(records, scene, name)) is not None}
        body += _panel(scene, runs, colours, surface, y, target)
        y += PANEL_HEIGHT + GAP
    height = y + 4
    what = "Test accuracy against time, " + " and ".join(_title(scene, records) for scene in scenes).lower()
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img" aria-label="{escape(what)}" font-family="{FONT}">',
            f"<title>{escape(what)}</title>",
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10" fill="{surface["page"]}" '
            f'stroke="{surface["line"]}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _title(scene: str, records: Sequence[Record]) -> str:
    return SCENES[scene].format(factor=next((one["slow_factor"] for one in records), 10))


def _panel(
    scene: str, runs: dict[str, Record], colours: dict[str, str], surface: dict[str, str], top: float, target: float
) -> list[str]:
    """Axes, the target and the lines of one scene."""
    longest_s = max((run["curve"][-1][0] for run in runs.values()), default=1.0)
    step_s = next(one for one in (1, 2, 5, 10, 20, 50, 100) if longest_s / one <= 9)
    per_s = (WIDTH - LEFT - RIGHT) / longest_s

    def at(time_s: float, accuracy: float) -> tuple[float, float]:
        share = (max(accuracy, LOWEST) - LOWEST) / (HIGHEST - LOWEST)
        return round(LEFT + time_s * per_s, 2), round(top + PANEL_HEIGHT * (1 - share), 2)

    bottom = top + PANEL_HEIGHT
    parts = [_text(24, top - 12, _title(scene, list(runs.values())), surface["text"], size=15, weight=650)]
    for tenth in range(round(LOWEST * 20), round(HIGHEST * 20) + 1):
        y = at(0, tenth / 20)[1]
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="{surface["grid"]}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tenth * 5} %", surface["soft"], anchor="end"))
    for tick in range(int(longest_s / step_s) + 1):
        x = at(tick * step_s, LOWEST)[0]
        parts.append(_text(x, bottom + 17, f"{tick * step_s}", surface["soft"], anchor="middle"))
    parts.append(_text(WIDTH - RIGHT, bottom + 33, "time (s)", surface["soft"], anchor="end", size=12.5))
    y = at(0, target)[1]
    parts.append(
        f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="{surface["soft"]}" stroke-dasharray="1 3"/>'
    )
    parts.append(_text(LEFT + 4, y - 5, f"{100 * target:g} %", surface["soft"], size=11))
    for name, run in runs.items():
        points = [at(time_s, accuracy) for time_s, accuracy in run["curve"] if accuracy >= LOWEST]
        if not points:
            continue
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = CONTROLS.get(name, DASHES[METHODS[name].system])
        broken = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2" stroke-linejoin="round"'
            f"{broken}><title>{escape(name)}</title></polyline>"
        )
        if run["time_to_target_s"] is not None:
            x, y = at(run["time_to_target_s"], target)
            parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colours[name]}" stroke="{surface["page"]}"/>')
    parts.append(f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" stroke="{surface["line"]}"/>')
    return parts


def _legend(methods: Sequence[str], colours: dict[str, str], surface: dict[str, str]) -> tuple[list[str], float]:
    """Names beside pieces of their lines, in rows; and where the first panel begins."""
    parts, x, y = [_text(24, 30, "Test accuracy against time", surface["text"], size=16, weight=650)], 24.0, 54.0
    for name in methods:
        label = name if METHODS[name].system in (*name.split(), "hivemind") else f"{name} ({METHODS[name].system})"
        width = 35 + 6.2 * len(label) + 16
        if x + width > WIDTH - RIGHT:
            x, y = 24.0, y + 21
        dash = CONTROLS.get(name, DASHES[METHODS[name].system])
        broken = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<line x1="{x:g}" y1="{y - 4:g}" x2="{x + 28:g}" y2="{y - 4:g}" stroke="{colours[name]}" stroke-width="2.5"'
            f"{broken}/>"
        )
        parts.append(_text(x + 35, y, label, surface["soft"], size=13))
        x += width
    return parts, y + 48


def _text(
    x: float, y: float, text: str, colour: str, *, anchor: str = "start", size: float = 12, weight: int | None = None
) -> str:
    heavy = f' font-weight="{weight}"' if weight else ""
    style = f'fill="{colour}" font-size="{size:g}" text-anchor="{anchor}"{heavy}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'
