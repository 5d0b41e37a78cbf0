"""What `foresight.md` says first, and what it makes of its figures; every number is computed of `foresight.json`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from foresight_figures import mean, median, relative_error, shortfall, staleness_of, total_variation

STALE = 0.005  # mean staleness, predicted or measured, from which there is a distribution to compare
LEAST_CHANGE = 1e-4  # of a relative error


def headline(plan: Any, parts: Mapping[str, Any]) -> str:
    """Which of its own bars the page meets."""
    predicted, measured, bars = parts["predicted"], parts["measured"], plan.bars
    there = [one for one in plan.settings if measured.get(one.key)]
    if not there:
        return "Nothing is measured yet."
    errors = [abs(error_of(one, predicted, measured)) for one in there]
    middle, most = statistics.median(errors), max(errors)
    worst = there[errors.index(most)]
    distances = distances_of(plan, predicted, measured)
    near = sum(one <= bars["staleness_distance"] for one in distances)
    lost = []
    for grid in plan.grids.values():
        if found := [one for one in grid if measured.get(one.key)]:
            speeds = {one.key: median(measured[one.key], "samples_per_s") for one in found}
            lost.append(shortfall({key: predicted[key]["samples_per_s"] for key in speeds}, speeds)[2])

    def verdict(value: float, bar: float) -> str:
        return "met" if value <= bar else "MISSED"

    words = (
        f"Wall time at worst is {most:.1%} off (`{worst.algorithm}` with {worst.workers} workers), where"
        f" {bars['worst_error']:.0%} is asked: {verdict(most, bars['worst_error'])}. The median error is {middle:.1%},"
        f" where {bars['median_error']:.0%} is asked: {verdict(middle, bars['median_error'])}. Of {len(distances)}"
        f" distributions of staleness {near} are within {bars['staleness_distance']:g} of the real ones:"
        f" {verdict(len(distances) - near, 0)}. Of {len(lost)} choices, the advised one is"
        f" {', '.join(f'{one:.1%}' for one in lost)} slower than the fastest, where {bars['advice_shortfall']:.0%} is asked:"
        f" {verdict(max(lost, default=0.0), bars['advice_shortfall'])}."
    )
    if "predicted_before" in parts:
        before = [abs(error_of(one, parts["predicted_before"], measured)) for one in there]
        words += (
            " The simulator was changed after the measurements, and all was predicted again from the same calibration: these"
            " are predictions in hindsight. Those made before the measurements had a median error of"
            f" {statistics.median(before):.1%}, the worst one {max(before):.1%}."
        )
    return words


def error_of(setting: Any, predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> float:
    """A setting's error in wall time."""
    return relative_error(predicted[setting.key]["wall_s"], median(measured[setting.key], "wall_s"))


def distances_of(plan: Any, predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[float]:
    """Of the settings whose gradients can be stale."""
    found = []
    for one in plan.settings:
        if measured.get(one.key):
            foreseen, real = predicted[one.key]["staleness"], staleness_of(measured[one.key])
            if max(mean(foreseen), mean(real)) > STALE:
                found.append(total_variation(foreseen, real))
    return found


def notes(plan: Any, parts: Mapping[str, Any]) -> list[str]:
    """What to make of the figures."""
    predicted, measured = parts["predicted"], parts["measured"]
    settings = [one for one in plan.settings if len(measured.get(one.key, ())) > 1]
    first = [abs(relative_error(predicted[one.key]["wall_s"], measured[one.key][0]["wall_s"])) for one in settings]
    later = [
        max(run["wall_s"] for run in measured[one.key][1:]) / measured[one.key][0]["wall_s"] - 1 for one in settings
    ]
    paces_ms = [
        1e3
        * statistics.median(
            pace_s for one in plan.all for run in measured.get(one.key, ())[nth : nth + 1] for pace_s in run["pace_s"]
        )
        for nth in range(plan.repetitions)
    ]
    means = [
        abs(relative_error(mean(predicted[one.key]["staleness"]), real))
        for one in settings
        if (real := mean(staleness_of(measured[one.key]))) > STALE
    ]
    lockstep = [one for grid in plan.grids.values() for one in grid if one.algorithm == "lockstep" and not one.sleep_ms]
    close = [
        one
        for grid in plan.grids.values()
        for one in grid
        if one.algorithm in ("hogwild", "leashed") and one.workers < 4 and not one.sleep_ms
    ]
    foreseen = [predicted[one.key]["samples_per_s"] for one in close]
    return [
        "## What to make of it",
        "",
        *(_changed(plan, parts) if "predicted_before" in parts else ()),
        "- The machine is a virtual one, whose host takes its cores' time away in bursts of minutes. A run during which others"
        " had more than a twentieth of that time was made again; the control shows how fast the machine was otherwise.",
        "- The model's structure is not untouched by these settings. A first series, which was stopped and is not in"
        " `foresight.json`, had all ten predicted too short. An exploratory run in one process then showed that a step after"
        " a sleep takes longer. That became `cold_s`, which `paceline calibrate` measures in one process, and everything was"
        " calibrated, predicted and measured anew. No setting was changed, and nothing was fitted to runs of several workers.",
        f"- The runs of everything were made one after the other, {plan.repetitions} times. The machine became slower: in"
        f" {sum(one > 0 for one in later)} of the {len(settings)} settings a later run took up to {max(later):.0%} longer than"
        f" the first; the control's median step was {', '.join(f'{one:.2f}' for one in paces_ms)} ms. Nothing was calibrated"
        f" or predicted anew for them. The first runs alone have a median error of {statistics.median(first):.1%}, the worst"
        f" {max(first):.1%}.",
        f"- Lockstep whose workers all compute is slower than predicted: its speeds with"
        f" {_listed(one.workers for one in lockstep)} workers were foreseen"
        f" {_listed(f'{_speed_error(one, parts):+.0%}' for one in lockstep)} off. With more workers than cores one core is"
        " probably idle at times while two workers share the other, as a kernel has a line for each core, and the simulator"
        " one for all; that was not measured.",
        "- Workers that compute all the time on fewer cores, and a server that everybody waits for, are more regular in"
        " simulation than in truth: there the most frequent staleness has too large a share. Means are right within"
        f" {max(means, default=0.0):.0%}.",
        "- Of those that compute all the time, `hogwild` and `leashed` with 2 or 3 workers are predicted within"
        f" {max(foreseen) / min(foreseen) - 1:.0%} of each other; runs of each differ by more than that among themselves."
        " `paceline advise` calls such a choice close.",
    ]


def _changed(plan: Any, parts: Mapping[str, Any]) -> list[str]:
    """What the change of the simulator did to the grids' speeds."""
    grid = [one for grid in plan.grids.values() for one in grid if one.sleep_ms]
    errors = [(abs(_speed_error(one, parts)), abs(_speed_error(one, parts, "predicted_before"))) for one in grid]
    nearer, farther = (sum(sign * (before - now) > LEAST_CHANGE for now, before in errors) for sign in (1, -1))
    return [
        "- Since the measurements, simulations charge the vectors that methods move"
        " ([docs/simulated_traffic.md](../../docs/simulated_traffic.md)), their locks are not handed over in order, and"
        " `all-reduce` overlaps with backward. What is charged was counted operation by operation in the code; nothing was"
        f" fitted to these runs. Of the {len(errors)} speeds of the first choice, {nearer} are nearer to what was"
        f" measured than before, and {farther} farther.",
    ]


def _speed_error(setting: Any, parts: Mapping[str, Any], predictions: str = "predicted") -> float:
    real = median(parts["measured"][setting.key], "samples_per_s")
    return relative_error(parts[predictions][setting.key]["samples_per_s"], real)


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))
