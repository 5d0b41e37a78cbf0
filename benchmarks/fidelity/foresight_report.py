"""What `foresight.py` compares, and how: errors, distances between distributions, choices; and the table of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from foresight_figures import mean, median, relative_error, shortfall, staleness_of, total_variation
from foresight_notes import STALE, headline, notes

from paceline.planner.system_model import SystemModel

__all__ = ["report"]

MADE_ON = (
    "Intel(R) Xeon(R) Processor, 2 cores; Python 3.11.7, torch 2.13.0+cpu"  # the calibration does not name its machine
)


def ernest_s(setting: Any, short_runs: Sequence[Any], measured: Mapping[str, list[dict[str, Any]]]) -> float:
    """What Ernest foresees: a round of one batch per worker, from short runs with other numbers of workers.

    The size of a round of m workers with batches of b is m * b, so "size / m" is the batch.
    """
    runs = [(one, run) for one in short_runs for run in measured.get(one.key, ())]
    workers = [one.workers for one, _ in runs]
    sizes = [one.workers * one.batch_size / setting.batch_size for one, _ in runs]
    times_s = [run["wall_s"] * one.workers / run["steps"] for one, run in runs]
    model = SystemModel.fit(workers, times_s, sizes, relative=True)
    round_s = model.predict(setting.workers, setting.workers).value
    return round_s * setting.epochs * 60_000 / setting.batch_size / setting.workers


def corrected_s(
    setting: Any, foreseen: Mapping[str, Any], short_runs: Sequence[Any], measured: Mapping[str, Any]
) -> float:
    """The simulation, with what steps of short runs with other numbers of workers took longer than they were simulated."""
    longer_s = [
        (run["wall_s"] - foreseen["short_runs_s"][one.key]) * one.workers / run["steps"]
        for one in short_runs
        if one.workers > 1
        for run in measured[one.key]
    ]
    return foreseen["wall_s"] + statistics.fmean(longer_s) * foreseen["steps"] / setting.workers


def report(plan: Any, parts: Mapping[str, Any]) -> str:
    """The page, of what is measured so far; `parts` are those of `foresight.json`."""
    predicted, measured = parts["predicted"], parts["measured"]
    runs = [run for one in plan.all for run in measured.get(one.key, ())]
    paces_s = [pace_s for run in runs for pace_s in run["pace_s"]]
    lines = [
        "# What is foreseen, and what comes",
        "",
        headline(plan, parts),
        "",
        "`python benchmarks/pages.py foresight` makes this page; calibration, predictions and measurements are in"
        " `foresight.json`, the settings in `foresight.toml`. `python benchmarks/fidelity/foresight.py all` makes them, and"
        " can be interrupted.",
        "",
        f"{parts.get('made_on', MADE_ON)}. Task"
        f" {plan.task}. Predictions are simulations of this machine as it was calibrated. Measured are medians of the"
        " runs that others left alone; the control, one process's step of batch 64 before and after each, took"
        f" {1e3 * min(paces_s):.2f} to {1e3 * max(paces_s):.2f} ms. The simulator has seen no runs with several"
        " workers. `corrected` is its time with what steps of short runs with other numbers of workers took longer than they"
        " were simulated; Ernest has seen the same short runs, and some with one worker.",
        "",
        *_settings(plan, predicted, measured),
        "",
        *_choices(plan, predicted, measured),
        "",
        *notes(plan, parts),
    ]
    return "\n".join([*lines, ""])


def _settings(plan: Any, predicted: Any, measured: Any) -> list[str]:
    lines = [
        f"## {len(plan.settings)} settings",
        "",
        "| algorithm | workers | batch | sleep, ms | predicted, s | measured, s (all) | error | corrected | Ernest |"
        " staleness: predicted, measured mean | distance |",
        "|---" * 11 + "|",
    ]
    errors: list[float] = []
    others: dict[str, list[float]] = {"corrected by short runs": [], "Ernest": []}
    distances = []
    for one in plan.settings:
        runs, foreseen = measured.get(one.key), predicted[one.key]
        sleep = f"{one.sleep_ms:g}" + (f", worker 0: {one.slow_sleep_ms:g}" if one.slow_sleep_ms is not None else "")
        begin = f"| `{one.algorithm}` | {one.workers} | {one.batch_size} | {sleep} | {foreseen['wall_s']:.2f} |"
        if not runs:
            lines.append(f"{begin} not yet | | | | | |")
            continue
        wall_s = median(runs, "wall_s")
        errors.append(abs(relative_error(foreseen["wall_s"], wall_s)))
        short = plan.short_runs(one)
        has_short = all(measured.get(run.key) for run in short)
        cells = ["-", "-"]
        if has_short:
            both_s = corrected_s(one, foreseen, short, measured), ernest_s(one, short, measured)
            found = [relative_error(time_s, wall_s) for time_s in both_s]
            cells = [f"{error:+.1%}" for error in found]
            for kept, error in zip(others.values(), found, strict=True):
                kept.append(abs(error))
        staleness, distance = "-", "-"
        real = staleness_of(runs)
        if max(mean(foreseen["staleness"]), mean(real)) > STALE:
            distances.append(total_variation(foreseen["staleness"], real))
            staleness = f"{mean(foreseen['staleness']):.2f}, {mean(real):.2f}"
            distance = f"{distances[-1]:.2f}"
        lines.append(
            f"{begin} {wall_s:.2f} ({', '.join(format(run['wall_s'], '.2f') for run in runs)}) |"
            f" {relative_error(foreseen['wall_s'], wall_s):+.1%} | {' | '.join(cells)} | {staleness} | {distance} |"
        )
    bars = plan.bars
    if errors:
        lines += [
            "",
            f"Wall time: median error {statistics.median(errors):.1%} (bar {bars['median_error']:.0%}), worst"
            f" {max(errors):.1%} (bar {bars['worst_error']:.0%}), of {len(errors)} settings.",
        ]
        for name, kept in others.items():
            if kept:
                lines[-1] += (
                    f" {name[0].upper()}{name[1:]}: {statistics.median(kept):.1%}, {max(kept):.1%}, of {len(kept)}."
                )
    if distances:
        near = sum(one <= bars["staleness_distance"] for one in distances)
        lines[-1] += (
            f" Staleness: {near} of {len(distances)} distributions are within {bars['staleness_distance']:g} of the real ones;"
            f" median distance {statistics.median(distances):.2f}, largest {max(distances):.2f}."
        )
    return lines


def _choices(plan: Any, predicted: Any, measured: Any) -> list[str]:
    lines = ["## Which is fastest?", ""]
    for name, grid in plan.grids.items():
        there = [one for one in grid if measured.get(one.key)]
        if not there:
            continue
        names = {one.key: f"`{one.algorithm}` with {one.workers}" for one in there}
        foreseen = {one.key: predicted[one.key]["samples_per_s"] for one in there}
        real = {one.key: median(measured[one.key], "samples_per_s") for one in there}
        advised, best, lost = shortfall(foreseen, real)
        lines += [
            f"{name[0].upper()}{name[1:]} (batch {grid[0].batch_size}, sleep {grid[0].sleep_ms:g} ms; {len(there)} of"
            f" {len(grid)} measured): advised {names[advised]}, fastest {names[best]}; the advised is {lost:.1%} slower"
            f" (bar {plan.bars['advice_shortfall']:.0%}).",
            "",
            "| algorithm | workers | predicted samples/s | measured samples/s | error |",
            "|---|---|---|---|---|",
        ]
        for one in there:
            lines.append(
                f"| `{one.algorithm}` | {one.workers} | {foreseen[one.key]:,.0f} | {real[one.key]:,.0f} |"
                f" {relative_error(foreseen[one.key], real[one.key]):+.1%} |"
            )
        lines.append("")
    return lines[:-1]
