"""`paceline advise backups` and `paceline plan backups`: the number of backup workers, before a run or from one."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import out, print_json, verbs
from paceline.cli.simulate import described
from paceline.errors import UsageError
from paceline.observe.words import SECONDS_IN, column_unit, number_text, span_text, whole_percent_text
from paceline.specs.bounds import BACKUPS, PLANNED_WORKERS, SECONDS

if TYPE_CHECKING:
    from paceline.planner.backups import BackupOption, BackupPlan
    from paceline.planner.order_statistics import Law
    from paceline.simulator.compute import ComputeTime

plan = verbs("Choose from what a run has measured.", no_args_is_help=True)

_in_times, _in_worth = options.panel("The workers' times"), options.panel("What a gradient is worth")
_NEAR = 0.02  # other numbers of backups are named if they are this close to the best
_DRAWS = 2000
_MEASURED_FOR_S = 2.0

_MaxBackups = Annotated[int | None, typer.Option(help="Maximum to consider; default: a quarter of the workers")]


def backups(
    cluster: Annotated[Path | None, _in_times(help="Cluster file (TOML or JSON) with compute times.")] = None,
    task: Annotated[str | None, _in_times(help="Task whose steps are measured here instead.")] = None,
    workers: Annotated[
        int | None, _in_times(help="Number of workers with backups; default: the cluster's, or 16")
    ] = None,
    slow: Annotated[list[str] | None, _in_times(help=options.SLOW)] = None,
    rest_s: Annotated[float, _in_times("--rest-s", help="Rest of each step: messages, update.")] = 0.0,
    noise_scale: Annotated[float | None, _in_worth(help="Gradient noise scale in samples.")] = None,
    batch_size: Annotated[int | None, _in_worth(help="Samples per gradient; default: the task's")] = None,
    spare: Annotated[bool, typer.Option("--spare", help="Backups are additional machines.")] = False,
    max_backups: _MaxBackups = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """How many backup workers a synchronous parameter server should have: Chen et al.'s trade-off.

    A step with b backups of n workers ends with the (n - b)-th gradient: it is shorter, but averages fewer gradients, so more
    steps are needed. With k gradients, their number is proportional to 1 + N / k, where N is the noise scale over the batch
    size; the default is N = 411, as published for Inception. For a recorded run: paceline plan backups RUN.

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
            "Give the source of the times: either --cluster FILE, or --task TASK to measure them here. For a recorded run, "
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
    if not as_json:
        rest = f", and {rest_s:g} s of each step for the rest" if rest_s else ""
        published = "as published for Inception; give --noise-scale for your own"
        rule = f"{_rule(worth)} ({published if noise_scale is None else 'from the noise scale'})"
        _show(plan, f"{machines.workers} workers; {source}{rest}.", rule, spare=spare)
        return
    about = {"workers": machines.workers, "spare": spare, "times": source, "rest_s": rest_s}
    about |= {"half_efficient_gradients": worth if math.isfinite(worth) else None, "steps_rule": _rule(worth)}
    print_json(about | _as_json(plan), allow_nan=False)


def _law(compute: ComputeTime, source: str, batch_size: int | None) -> tuple[Law, str, int | None]:
    """A cluster's compute times as a law; 2,000 draws represent an unknown distribution."""
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


def _show(found: BackupPlan, source: str, rule: str, *, spare: bool = False) -> None:
    """Prints a row for every number of backups, the best marked, and the spec of the best."""
    from paceline.observe.document import Cell, Table
    from paceline.observe.terminal import terminal_table

    unit = column_unit(row.step_s.value for row in found.rows)
    size_s = SECONDS_IN[unit]
    heads = ["back-\nups", "ma-\nchines" if spare else "gra-\ndients", f"step\n({unit})"]
    heads += [f"90 %\ninterval ({unit})"] if found.sure is not None else []
    total = "machines\nx time" if spare else "time to\ntarget"
    heads += [f"90 % of the\nsteps ({unit})", "gra-\ndients/s", "steps", total]
    rows = []
    for row in found.rows:
        best = row is found.best
        texts = [f"{'best ' if best else ''}{row.backups}", str(row.machines if spare else row.gradients_per_step)]
        texts.append(number_text(row.step_s.value / size_s))
        if found.sure is not None:
            texts.append(span_text(row.step_s.low / size_s, row.step_s.high / size_s))
        texts.append(span_text(row.steps_5_percent_s / size_s, row.steps_95_percent_s / size_s))
        total = row.machine_time_relative if spare else row.time_relative.value
        texts += [f"{one:.3f}" for one in (row.throughput_relative, row.steps_relative, total)]
        rows.append([Cell(text, kind="best" if best else "") for text in texts])
    notes = [f"The last three columns are relative to b = 0. The number of steps is proportional to {rule}."]
    if found.sure is not None:
        share = whole_percent_text(found.sure)
        notes.append(
            f"The same b is best in {share} of the cases in which a twentieth of the recorded times is left out."
        )
    if not spare:
        near = found.within(_NEAR)
        notes.append(f"Within 2 % of the best: b = {near[0]}{f' to {near[-1]}' if len(near) > 1 else ''}.")
    console = out()
    console.print(source)
    console.print(terminal_table(Table(rows, heads)))
    for note in notes:
        console.print(note, style="dim")
    machines = f" with {found.best.machines} workers" if spare else f" --workers {found.best.machines}"
    console.print(f'Best: --algorithm "{_spec_of(found.best)}"{machines}')


def _rule(half_efficient: float) -> str:
    return "1 / k" if math.isinf(half_efficient) else f"1 + {half_efficient:.4g} / k"


def _spec_of(row: BackupOption) -> str:
    """The algorithm with this number of backups."""
    return f"parameter-server(mode=sync(backups={row.backups}))" if row.backups else "parameter-server"


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
            help="Gradients per step at which each is worth half of one alone; with N, steps are proportional to 1 + this / N."
            " 411 is published for Inception; small models on small data: tens; inf: proportional to 1 / N.",
        ),
    ] = 411.0,
    max_backups: _MaxBackups = None,
    as_json: options.Json = False,
) -> None:
    """How many backup workers a synchronous parameter server should have, from a run's times.

    With b backups of M workers, a step ends with the (M - b)-th gradient: it is shorter, but more steps are needed, as each
    averages fewer gradients. The best b has the least total time. If workers are slow for many steps in a row, steps with few
    backups take longer than predicted.

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
        raise UsageError(f"{run} had 1 worker, but backups need several: plan from a run with all of your workers.")
    found = plan_arrivals(seen.times_s, half_efficient=half_efficient, max_backups=max_backups)
    source = f"{len(seen.times_s):,} steps of {run}" if seen.as_they_came else f"each worker's own times in {run}"
    if not as_json:
        _show(found, f"{seen.num_workers} workers; {source}.", _rule(half_efficient))
        return
    # Scaled to the steps of this run, whose updates may have averaged another number of gradients.
    for_one = seen.updates / steps_to_target(max(1.0, seen.gradients_per_update), half_efficient)
    answer = _as_json(found)
    for row in answer["rows"]:
        row["steps"] = for_one * steps_to_target(row["gradients_per_step"], half_efficient)
        row["total_s"] = row["step_s"]["value"] * row["steps"]
    print_json({"run": str(run), "workers": seen.num_workers, "as_they_came": seen.as_they_came} | answer)
