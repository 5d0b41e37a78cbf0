"""`paceline plan`: what to choose, from what a run has measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.advise_backups import NEAR, spec_of
from paceline.cli.console import out, print_json, verbs
from paceline.errors import UsageError
from paceline.specs.bounds import BACKUPS

if TYPE_CHECKING:
    from paceline.observe.gradient_times import GradientTimes
    from paceline.planner.backups import BackupPlan

__all__ = ["backups", "plan"]

plan = verbs("Choose from what a run has measured.", no_args_is_help=True)

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

    from paceline.observe.gradient_times import gradient_times
    from paceline.planner.backup_times import steps_to_target
    from paceline.planner.backups import plan_arrivals
    from paceline.records.run_data import RunData

    seen = gradient_times(RunData.load(run).records)
    if seen is None:
        raise UsageError(f"{run} has no events: plan from a run that has trained.")
    if seen.num_workers < 2:
        raise UsageError(
            f"{run} had 1 worker, and backups are among several: plan from a run with as many as you have."
        )
    choice = plan_arrivals(seen.times_s, half_efficient=half_efficient, max_backups=max_backups)
    # For what the run came to in its own steps, whose updates may have been of another number of gradients.
    for_one = seen.updates / steps_to_target(max(1.0, seen.gradients_per_update), half_efficient)
    steps = {row.backups: for_one * steps_to_target(row.gradients, half_efficient) for row in choice.rows}
    if as_json:
        print_json(_as_json(run, seen, choice, steps))
    else:
        _show(seen, choice, steps)


def _as_json(run: Path, seen: GradientTimes, choice: BackupPlan, steps: dict[int, float]) -> dict[str, Any]:
    rows = [
        {
            "backups": row.backups,
            "gradients_per_step": row.gradients,
            "step_s": row.step_s.value,
            "steps": steps[row.backups],
            "total_s": row.step_s.value * steps[row.backups],
            "total_relative": row.time.value,
            "discounted_speed_up": row.throughput,
        }
        for row in choice.rows
    ]
    return {
        "run": str(run),
        "workers": seen.num_workers,
        "steps_seen": len(seen.times_s) if seen.as_they_came else 0,
        "as_they_came": seen.as_they_came,
        "best": choice.best.backups,
        "within_2_percent": choice.within(NEAR),
        "rows": rows,
    }


def _show(seen: GradientTimes, choice: BackupPlan, steps: dict[int, float]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        "Backups b", "Gradients per step", "Time per step", "Steps", "Total time", "To b = 0", box=box.SIMPLE_HEAD
    )
    step_unit = _unit([row.step_s.value for row in choice.rows])
    total_unit = _unit([row.step_s.value * steps[row.backups] for row in choice.rows])
    for row in choice.rows:
        best = row is choice.best
        table.add_row(
            f"{row.backups}{' (best)' if best else ''}",
            str(row.gradients),
            _time(row.step_s.value, step_unit),
            f"{steps[row.backups]:,.0f}",
            _time(row.step_s.value * steps[row.backups], total_unit),
            f"{row.time.value:.3f}",
            style="bold green" if best else None,
        )
    console = out()
    source = (
        f"{len(seen.times_s):,} steps as they came" if seen.as_they_came else "each worker's own times, put together"
    )
    console.print(f"{seen.num_workers} workers; from {source}.")
    console.print(table)
    near = choice.within(NEAR)
    span = f"{near[0]} to {near[-1]}" if len(near) > 1 else f"{near[0]} alone"
    console.print(f'Best: --algorithm "{spec_of(choice.best)}". Within 2 % of it: b = {span}.', soft_wrap=True)


def _unit(column_s: list[float]) -> str:
    """One unit for a column, in which its least number is 1 or more."""
    least_s = min(column_s)
    return next((unit for unit, size_s in _UNITS_S.items() if least_s >= size_s), "ms")


def _time(seconds: float, unit: str) -> str:
    return f"{seconds / _UNITS_S[unit]:,.3f} {unit}" if math.isfinite(seconds) else "never"
