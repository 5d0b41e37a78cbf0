"""`paceline advise backups` and `paceline plan backups`: how many backup workers, before any run, and from a recorded run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import out, print_json, verbs
from paceline.cli.simulate import described
from paceline.errors import UsageError
from paceline.specs.bounds import BACKUPS, PLANNED_WORKERS, SECONDS

if TYPE_CHECKING:
    from paceline.observe.gradient_times import GradientTimes
    from paceline.planner.backups import BackupOption, BackupPlan
    from paceline.planner.order_statistics import Law
    from paceline.simulator.compute import ComputeTime

plan = verbs("Choose from what a run has measured.", no_args_is_help=True)

_in_times, _in_worth = options.panel("The workers' times"), options.panel("What a gradient is worth")
_NEAR = 0.02  # other numbers of backups are named if they are this close to the best
_DRAWS = 2000
_MEASURED_FOR_S = 2.0

MaxBackups = Annotated[int | None, typer.Option(help="Most to consider; default: a quarter of the workers")]


def backups(
    cluster: Annotated[Path | None, _in_times(help="TOML or JSON file: its compute times.")] = None,
    task: Annotated[str | None, _in_times(help="Or a task, whose steps are measured here.")] = None,
    workers: Annotated[
        int | None, _in_times(help="How many, backups among them; default: the cluster's, or 16")
    ] = None,
    slow: Annotated[list[str] | None, _in_times(help=options.SLOW)] = None,
    rest_s: Annotated[float, _in_times("--rest-s", help="Of each step besides: messages, update.")] = 0.0,
    noise_scale: Annotated[
        float | None, _in_worth(help="Samples at which noise and gradient are equal; inf: all count.")
    ] = None,
    batch_size: Annotated[int | None, _in_worth(help="Samples per gradient; default: the task's")] = None,
    spare: Annotated[bool, typer.Option("--spare", help="Backups are machines besides the workers.")] = False,
    max_backups: MaxBackups = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """How many backup workers a synchronous parameter server should have: Chen et al.'s trade.

    A step with b backups of n workers ends with the (n - b)-th gradient: it is shorter, but averages fewer gradients, so more
    steps are needed. With k gradients these go as 1 + N / k, where N is the noise scale over the batch size; without a noise
    scale N = 411, as published for Inception. From a run that was recorded: paceline plan backups RUN.

    Example: paceline advise backups --cluster here.toml --workers 32
    """
    options.check_numbers({"batch_size": batch_size, "data": data})
    SECONDS.check("--rest-s", rest_s)
    if max_backups is not None:
        BACKUPS.check("--max-backups", max_backups)
    if workers is not None:
        PLANNED_WORKERS.check("--workers", workers)
    if (cluster is None) == (task is None):
        raise UsageError(
            "Say whose times to use: either --cluster FILE, or --task TASK to measure them here. For a recorded run, "
            "use paceline plan backups."
        )
    if noise_scale is not None and not noise_scale >= 0:
        raise UsageError(f"--noise-scale must be 0 samples or more, not {noise_scale:g}.")
    machines = described(cluster, workers if cluster is not None else workers or 16, slow, None)
    PLANNED_WORKERS.check("The number of workers", machines.workers)
    if machines.workers < 2 and not spare:
        raise UsageError("Backups need several workers: give --workers 2 or more.")
    if max_backups is None:
        max_backups = min(max(1, machines.workers // 4), int(BACKUPS.most))
    if noise_scale is not None and batch_size is None and task is None:
        raise UsageError("--noise-scale counts samples: give the samples per gradient with --batch-size.")

    from paceline.planner.backup_times import PUBLISHED_HALF_EFFICIENT
    from paceline.planner.backups import plan_backups

    law, source, points = (
        _law(machines.compute, f"of {cluster}", batch_size) if task is None else _measured(task, batch_size, data)
    )
    worth = PUBLISHED_HALF_EFFICIENT if noise_scale is None or points is None else noise_scale / points
    factors = [machines.factor(worker) for worker in range(machines.workers)]
    plan = plan_backups(law, factors, half_efficient=worth, max_backups=max_backups, rest_s=rest_s, spare=spare)
    about = {
        "workers": machines.workers,
        "spare": spare,
        "times": source,
        "rest_s": rest_s,
        "half_efficient_gradients": worth if math.isfinite(worth) else None,
        "steps_rule": "1 / k" if math.isinf(worth) else f"1 + {worth:.4g} / k",
    }
    if as_json:
        print_json(about | _as_json(plan), allow_nan=False)
    else:
        _show(plan, about, published=noise_scale is None)


def _law(compute: ComputeTime, source: str, batch_size: int | None) -> tuple[Law, str, int | None]:
    """A cluster's compute times as a law; an unknown distribution by 2,000 draws."""
    from scipy import stats

    from paceline.planner.order_statistics import RecordedTimes
    from paceline.simulator import compute as models

    match compute:
        case models.Constant():
            law = RecordedTimes([compute.time_s])
        case models.Normal():
            z = -compute.average_s / compute.deviation_s  # of 0 s
            law = stats.truncnorm(z, math.inf, compute.average_s, compute.deviation_s)
        case models.ExponentialTail():
            law = stats.expon(compute.least_s, compute.tail_s)
        case models.Pareto():
            law = stats.pareto(compute.shape, scale=compute.least_s)
        case models.Recorded():
            return RecordedTimes(compute.times_s), f"{len(compute.times_s):,} recorded times {source}", batch_size
        case _:
            draws = compute.draws_s(Random(0))
            law = RecordedTimes([next(draws) for _ in range(_DRAWS)])
    return law, f"{models.compute_registry.spec(compute)} {source}", batch_size


def _measured(task: str, batch_size: int | None, data: Path | None) -> tuple[Law, str, int]:
    """A task's steps without their update, measured on one core of this machine for two seconds."""
    from paceline.advice.calibration import probes
    from paceline.planner.order_statistics import RecordedTimes
    from paceline.tasks import load_task

    loaded = load_task(task)
    train_set, _ = loaded.load(data)
    points = batch_size or loaded.batch_size
    rows = probes.steps(loaded, train_set, points, at_least=200, for_s=_MEASURED_FOR_S)
    times_s = rows["input_s"] + rows["gradient_ended_s"] - rows["gradient_started_s"]
    return RecordedTimes(times_s), f"{len(times_s):,} steps of {loaded.name}, measured here on one core", points


def _as_json(plan: BackupPlan) -> dict[str, Any]:
    return {
        "best": plan.best.backups,
        "algorithm": _spec_of(plan.best),
        "machines": plan.best.machines,
        "within_2_percent": plan.within(_NEAR),
        "best_in_subsets_share": plan.sure,
        "rows": [asdict(row) for row in plan.rows],
    }


def _show(found: BackupPlan, about: dict[str, Any], *, published: bool) -> None:
    from paceline.observe.words import SECONDS_IN, column_unit, number_text, span_text, whole_percent_text

    unit = column_unit(row.step_s.value for row in found.rows)
    size_s = SECONDS_IN[unit]
    spare = about["spare"]
    columns: dict[str, Callable[[BackupOption], str]] = {
        "ma-\nchines" if spare else "gra-\ndients": lambda row: str(row.machines if spare else row.gradients_per_step),
        f"step\n({unit})": lambda row: number_text(row.step_s.value / size_s),
    }
    if found.sure is not None:
        columns[f"90 %\ninterval ({unit})"] = lambda row: span_text(row.step_s.low / size_s, row.step_s.high / size_s)
    columns |= {
        f"90 % of the\nsteps ({unit})": lambda row: span_text(
            row.steps_5_percent_s / size_s, row.steps_95_percent_s / size_s
        ),
        "gra-\ndients/s": lambda row: f"{row.throughput_relative:.3f}",
        "steps": lambda row: f"{row.steps_relative:.3f}",
        "machines\nx time" if spare else "time to\ntarget": lambda row: (
            f"{row.machine_time_relative if spare else row.time_relative.value:.3f}"
        ),
    }
    rest = f", and {about['rest_s']:g} s of each step for the rest" if about["rest_s"] else ""
    rule = "as published for Inception; give --noise-scale for your own" if published else "from the noise scale"
    notes = [f"Last three columns: relative to b = 0. Steps to the target go as {about['steps_rule']} ({rule})."]
    if found.sure is not None:
        share = whole_percent_text(found.sure)
        notes.append(
            f"Without one twentieth of the recorded times or another, the same b is best in {share} of the cases."
        )
    more = f" with {found.best.machines} workers" if spare else f" --workers {found.best.machines}"
    near = "" if spare else _near_text(found)
    _print(found, f"{about['workers']} workers; {about['times']}{rest}.", columns, notes, f"{more}.{near}")


def _print(
    found: BackupPlan, title: str, columns: Mapping[str, Callable[[BackupOption], str]], notes: Sequence[str], end: str
) -> None:
    """A row for every number of backups, the best marked, and the spec that has it."""
    from rich.text import Text

    from paceline.observe.terminal import BEST, figures_table

    table = figures_table(None, ["back-\nups", *columns])
    for row in found.rows:
        best = row is found.best
        number = f"{'best ' if best else ''}{row.backups}"
        table.add_row(number, *(cell(row) for cell in columns.values()), style=BEST if best else None)
    console = out()
    console.print(Text(title), soft_wrap=True)
    console.print(table)
    for note in notes:
        console.print(Text(note, style="dim"), soft_wrap=True)
    console.print(f'Best: --algorithm "{_spec_of(found.best)}"{end}', soft_wrap=True)


def _spec_of(row: BackupOption) -> str:
    """The algorithm with this number of backups."""
    return f"parameter-server(mode=sync(backups={row.backups}))" if row.backups else "parameter-server"


def _near_text(found: BackupPlan) -> str:
    """Other numbers of backups that are nearly as good."""
    near = found.within(_NEAR)
    return f" Within 2 % of it: b = {near[0]}{f' to {near[-1]}' if len(near) > 1 else ' alone'}."


@plan.callback()
def _about() -> None:
    """Makes this a group, although it has only one verb."""


@plan.command("backups")
def backups_of_run(
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
    as_json: options.Json = False,
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
        raise UsageError(f"{run} had 1 worker, but backups need several: plan from a run with as many as you have.")
    choice = plan_arrivals(seen.times_s, half_efficient=half_efficient, max_backups=max_backups)
    # For what the run came to in its own steps, whose updates may have been of another number of gradients.
    for_one = seen.updates / steps_to_target(max(1.0, seen.gradients_per_update), half_efficient)
    steps = {row.backups: for_one * steps_to_target(row.gradients_per_step, half_efficient) for row in choice.rows}
    if as_json:
        print_json(_run_as_json(run, seen, choice, steps))
    else:
        _show_run(seen, choice, steps)


def _run_as_json(run: Path, seen: GradientTimes, choice: BackupPlan, steps: dict[int, float]) -> dict[str, Any]:
    rows = [
        {
            "backups": row.backups,
            "gradients_per_step": row.gradients_per_step,
            "step_s": row.step_s.value,
            "steps": steps[row.backups],
            "total_s": row.step_s.value * steps[row.backups],
            "total_relative": row.time_relative.value,
            "discounted_speed_up": row.throughput_relative,
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


def _show_run(seen: GradientTimes, choice: BackupPlan, steps: dict[int, float]) -> None:
    from paceline.observe.words import SECONDS_IN, column_unit, number_text

    total_s = {row.backups: row.step_s.value * steps[row.backups] for row in choice.rows}
    step_unit, total_unit = column_unit(row.step_s.value for row in choice.rows), column_unit(total_s.values())

    def time_text(value_s: float, unit: str) -> str:
        return number_text(value_s / SECONDS_IN[unit]) if math.isfinite(value_s) else "never"

    columns: dict[str, Callable[[BackupOption], str]] = {
        "gradients\nper step": lambda row: str(row.gradients_per_step),
        f"step\n({step_unit})": lambda row: time_text(row.step_s.value, step_unit),
        "steps": lambda row: f"{steps[row.backups]:,.0f}",
        f"total\n({total_unit})": lambda row: time_text(total_s[row.backups], total_unit),
        "to\nb = 0": lambda row: f"{row.time_relative.value:.3f}",
    }
    source = (
        f"{len(seen.times_s):,} steps as they came" if seen.as_they_came else "each worker's own times, put together"
    )
    _print(choice, f"{seen.num_workers} workers; from {source}.", columns, (), f".{_near_text(choice)}")
