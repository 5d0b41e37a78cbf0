"""Advice as one offline HTML file: verdict, ranking, figures, warnings, and the command to start."""

from __future__ import annotations

from pathlib import Path

from paceline.advice.answer import Advice
from paceline.advice.figures import advice_figures
from paceline.advice.tables import fits_table, ranking
from paceline.advice.words import asked, verdict
from paceline.observe.document import settings_table, write_page
from paceline.observe.words import seconds_text


def write_report(advice: Advice, path: Path, *, command: str = "") -> Path:
    """Write the page, about 5 MB, nearly all of it plotly.js."""
    machine = [(f"machine {name}", [value]) for name, value in advice.machine.items()]
    return write_page(
        path,
        "advice/report.html",
        title=f"{advice.program}: which algorithm, how many workers",
        asked=asked(advice),
        headline=verdict(advice),
        reasons=advice.reasons if advice.best is not None else (),
        start=advice.command,
        figures=advice_figures(advice),
        ranking=ranking(advice),
        warnings=advice.warnings,
        not_tried=advice.not_tried,
        fits=fits_table(advice),
        command=command,
        settings=settings_table([("it took", [seconds_text(advice.took_s)]), *machine]),
    )
