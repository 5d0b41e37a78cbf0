"""`paceline plan`: what to choose, from what a run has measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import out
from paceline.errors import UsageError
from paceline.specs.bounds import BACKUPS

if TYPE_CHECKING:
    from paceline.algorithms.server.backups import BackupChoice
    from paceline.observe.arrivals import Arrivals

__all__ = ["backups", "plan"]

plan = typer.Typer(
    no_args_is_help=True,
    help="Choose from what a run has measured.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_NEAR = 0.02
_UNITS_S = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}


@plan.callback()
def _about() -> None:
    """A group, although it has one verb so far."""


@plan.command()
def backups(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run, real or simulated, with as many workers as planned for")
    ],
    half_efficient: Annotated[
        float,
        typer.Option(
            help="N at which a gradient is worth half of one alone: steps to converge go as 1 + this / N. 411 is"
            " published for Inception; small models on small data: tens; inf: steps fall as 1 / N for ever.",
        ),
    ] = 411.0,
    max_backups: Annotated[int | None, typer.Option(help="Most to consider; default: a quarter of the workers")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, in stdout's last line.")] = False,
) -> None:
    """How many backup workers a synchronous parameter server should have, from a run's times.

    With b backups of M workers, a step ends with the (M - b)-th gradient: it is shorter, but more steps are needed, as each
    averages fewer gradients. Total time is one times the other; the best b has the least. Where workers are held up for many
    steps at a time, steps with few backups take longer than that.

    Example: paceline plan backups runs/one
    """
    if not half_efficient >= 0:
        raise UsageError(f"--half-efficient must be 0 or more, not {half_efficient}.")
    if max_backups is not None:
        BACKUPS.check("--max-backups", max_backups)

    from paceline.algorithms.server.backups import StepsModel, choose_backups
    from paceline.observe.arrivals import arrivals
    from paceline.records.run_data import RunData

    seen = arrivals(RunData.load(run).records)
    if seen is None:
        raise UsageError(f"{run} has no events: plan from a run that has trained.")
    if seen.num_workers < 2:
        raise UsageError(
            f"{run} had 1 worker, and backups are among several: plan from a run with as many as you have."
        )
    model = StepsModel(half_efficient=half_efficient)
    choice = choose_backups(seen.times_s, model, max_backups)
    steps = {row.backups: _steps(model, seen, row.backups) for row in choice.rows}
    if as_json:
        print(json.dumps(_as_json(run, seen, choice, steps)))
    else:
        _show(seen, choice, steps)


def _steps(model: Any, seen: Arrivals, num_backups: int) -> float:
    """Steps for what the run came to in its own, whose updates may have been of another number of gradients."""
    num_aggregated = seen.num_workers - num_backups
    return seen.updates * model.steps(num_aggregated) / model.steps(max(1.0, seen.gradients_per_update))


def _as_json(run: Path, seen: Arrivals, choice: BackupChoice, steps: dict[int, float]) -> dict[str, Any]:
    rows = [
        {
            "backups": row.backups,
            "gradients_per_step": seen.num_workers - row.backups,
            "step_s": row.step_s,
            "steps": steps[row.backups],
            "total_s": row.step_s * steps[row.backups],
            "total_relative": row.total,
            "discounted_speed_up": row.discounted_speed_up,
        }
        for row in choice.rows
    ]
    return {
        "run": str(run),
        "workers": seen.num_workers,
        "steps_seen": len(seen.times_s) if seen.as_they_came else 0,
        "as_they_came": seen.as_they_came,
        "best": choice.best.backups,
        "within_2_percent": choice.within(_NEAR),
        "rows": rows,
    }


def _show(seen: Arrivals, choice: BackupChoice, steps: dict[int, float]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        "Backups b", "Gradients per step", "Time per step", "Steps", "Total time", "To b = 0", box=box.SIMPLE_HEAD
    )
    step_unit = _unit([row.step_s for row in choice.rows])
    total_unit = _unit([row.step_s * steps[row.backups] for row in choice.rows])
    for row in choice.rows:
        best = row is choice.best
        table.add_row(
            f"{row.backups}{' (best)' if best else ''}",
            str(seen.num_workers - row.backups),
            _time(row.step_s, step_unit),
            f"{steps[row.backups]:,.0f}",
            _time(row.step_s * steps[row.backups], total_unit),
            f"{row.total:.3f}",
            style="bold green" if best else None,
        )
    console = out()
    source = (
        f"{len(seen.times_s):,} steps as they came" if seen.as_they_came else "each worker's own times, put together"
    )
    console.print(f"{seen.num_workers} workers; from {source}.")
    console.print(table)
    near = choice.within(_NEAR)
    span = f"{near[0]} to {near[-1]}" if len(near) > 1 else f"{near[0]} alone"
    spec = f"parameter-server(mode=sync(backups={choice.best.backups}))" if choice.best.backups else "parameter-server"
    console.print(f'Best: --algorithm "{spec}". Within 2 % of it: b = {span}.', soft_wrap=True)


def _unit(column_s: list[float]) -> str:
    """One unit for a column, in which its least number is 1 or more."""
    least_s = min(column_s)
    return next((unit for unit, size_s in _UNITS_S.items() if least_s >= size_s), "ms")


def _time(seconds: float, unit: str) -> str:
    return f"{seconds / _UNITS_S[unit]:,.3f} {unit}" if math.isfinite(seconds) else "never"
