"""`paceline plan`: choices from a run's measurements."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.advise_backups import NEAR, near_text, spec_of
from paceline.cli.console import out, print_json, verbs
from paceline.errors import UsageError
from paceline.specs.bounds import BACKUPS

if TYPE_CHECKING:
    from paceline.observe.gradient_times import GradientTimes
    from paceline.planner.backups import BackupPlan

__all__ = ["backups", "plan"]

plan = verbs("Choose from what a run has measured.", no_args_is_help=True)


@plan.callback()
def _about() -> None:
    """Makes this a group, although it has only one verb."""


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
    from paceline.observe.terminal import BEST, figures_table
    from paceline.observe.words import SECONDS_IN, column_unit, number_text

    total_s = {row.backups: row.step_s.value * steps[row.backups] for row in choice.rows}
    step_unit, total_unit = column_unit(row.step_s.value for row in choice.rows), column_unit(total_s.values())
    heads = [
        "back-\nups",
        "gradients\nper step",
        f"step\n({step_unit})",
        "steps",
        f"total\n({total_unit})",
        "to\nb = 0",
    ]
    table = figures_table(None, heads)
    for row in choice.rows:
        best, total = row is choice.best, total_s[row.backups]
        table.add_row(
            f"{'best ' if best else ''}{row.backups}",
            str(row.gradients),
            number_text(row.step_s.value / SECONDS_IN[step_unit]) if math.isfinite(row.step_s.value) else "never",
            f"{steps[row.backups]:,.0f}",
            number_text(total / SECONDS_IN[total_unit]) if math.isfinite(total) else "never",
            f"{row.time.value:.3f}",
            style=BEST if best else None,
        )
    console = out()
    source = (
        f"{len(seen.times_s):,} steps as they came" if seen.as_they_came else "each worker's own times, put together"
    )
    console.print(f"{seen.num_workers} workers; from {source}.")
    console.print(table)
    console.print(f'Best: --algorithm "{spec_of(choice.best)}".{near_text(choice)}', soft_wrap=True)
