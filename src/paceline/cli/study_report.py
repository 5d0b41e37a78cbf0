"""`paceline study report` and `paceline study compare`: a study's results, as a page and in the terminal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import out, print_json
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.study.findings import Comparison
    from paceline.study.trials import Trials

_Folder = Annotated[Path, typer.Argument(help="The study's folder.", show_default=False)]
_Baseline = Annotated[
    str | None, typer.Option(help="What others are compared with; default: the study's, else the first")
]


def report(folder: _Folder, baseline: _Baseline = None) -> None:
    """Write a study's report.html again.

    Example: paceline study report runs/memory --baseline "locked(kind=mutex)"
    """
    from paceline.study.report import write_report

    out().print(f"Report: {write_report(folder, baseline=baseline)}", soft_wrap=True)


def compare(
    folder: _Folder,
    baseline: _Baseline = None,
    by: Annotated[str | None, typer.Option(help="The factor whose levels are compared; default algorithm")] = None,
    where: Annotated[list[str] | None, typer.Option(help="Only trials with FACTOR=LEVEL; repeat for more")] = None,
    target: Annotated[
        str | None, typer.Option(help="Percent of the initial loss; default: what half of all reached")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare a study's methods with one of them, by pairs of trials.

    Example: paceline study compare runs/memory --baseline hogwild --where workers=4
    """
    from paceline.observe.terminal import shown
    from paceline.study.findings import compare_levels
    from paceline.study.report import read_study_file, trials_of
    from paceline.study.report_tables import comparisons_table
    from paceline.study.table import load_table

    trials = trials_of(load_table(folder), read_study_file(folder), by=by, baseline=baseline)
    if by is not None and by not in trials.all_factors:
        raise UsageError(f"The study has no factor '{by}'; it has {', '.join(trials.all_factors)}.")
    if not trials.methods:
        raise UsageError(f"The study in {folder} has no trials yet: run it with `paceline study run`.")
    if len(trials.methods) < 2:
        raise UsageError(f"All trials have the same {trials.by}; name another factor with --by, or look at the report.")
    measure = trials.primary if target is None else trials.measure("time", _percent(target, trials))
    found = compare_levels(trials, measure, _where(where or [], trials))
    if as_json:
        print_json([_record(one) for one in found])
        return
    title = f"Ratios of {measure.title}, {trials.baseline} as baseline; findings are bold"
    out().print(shown(comparisons_table(found), title))
    if not any(one.found for one in found):
        out().print("No interval excludes 1 and holds among all that are compared here, or there are too few pairs.")


def _percent(target: str, trials: Trials) -> str:
    wanted = target.strip().removesuffix("%").strip()
    if wanted not in trials.fractions:
        raise UsageError(f"--target {target} was not measured; choose one of {', '.join(trials.fractions)}.")
    return wanted


def _where(given: list[str], trials: Trials) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for text in given:
        factor, equals, level = text.partition("=")
        known = trials.levels(factor) if factor in trials.column_of else []
        match = next((one for one in known if str(one) == level or _is_number(one, level)), None)
        if not equals or match is None:
            levels = f" levels {', '.join(map(str, known))}" if known else f" factors {', '.join(trials.column_of)}"
            raise UsageError(f"--where takes FACTOR=LEVEL, not '{text}'; the study has the{levels}.")
        held[factor] = match
    return held


def _is_number(known: Any, text: str) -> bool:
    try:
        return not isinstance(known, bool | str) and float(text) == known
    except ValueError:
        return False


def _record(one: Comparison) -> dict[str, Any]:
    ratio = one.ratio
    values = {
        "ratio_at_least": ratio.at_least, "ratio_at_most": ratio.at_most, "low": ratio.low, "high": ratio.high,
        "adjusted_p": one.adjusted_p,
    }  # fmt: skip
    return {
        "base": one.base, "other": one.other, "where": dict(one.where), "measure": one.measure.column, "pairs": ratio.pairs,
        "complete": ratio.complete, "interval": ratio.method, "finding": one.found,
        **{name: value if math.isfinite(value) else None for name, value in values.items()},
    }  # fmt: skip
