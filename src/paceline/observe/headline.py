"""The outcome of one or several runs, in one sentence; the table below it has the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.observe.compare import CLEAR_RATIO, Group, failed, figure, group_runs, target_text
from paceline.observe.words import few, number_text, seconds_text, workers_text
from paceline.records.summary import FRACTIONS

__all__ = ["caution", "headline"]

_FEW = 3


def headline(results: Sequence[Mapping[str, Any]]) -> str:
    """The best method and its lead, or how the only run ended.

    Methods are compared by the time to the target if any reached it, else by the time to the smallest fraction of the
    initial loss that any reached, else by the final training loss. Uses medians if a method has several runs. Ratios
    below `CLEAR_RATIO` name no winner.
    """
    if not results:
        return "There are no runs."
    if len(results) == 1:
        return _of_one(results[0])
    if len({str(result.get("task")) for result in results}) > 1:
        return "These runs trained different tasks, so their losses and times cannot be compared."
    groups = group_runs(results)
    goals = [(("time_to_target_s",), f"reached {target_text(results[0])}")]
    goals += [
        (("time_to_fraction_s", fraction), f"brought the training loss to {float(fraction) * 100:g} % of its start")
        for fraction in sorted(FRACTIONS, key=float)
    ]
    for path, did in goals:
        if times := _values(groups, *path):
            return _ranked(times, len(groups), f"{did} soonest", did, seconds_text)
    if losses := _values(groups, "train_loss"):
        did = "ended with a training loss"
        return _ranked(losses, len(groups), "ended with the lowest training loss", did, number_text)
    return "No run that ended well reported a loss, so the methods cannot be compared by it."


def caution(results: Sequence[Mapping[str, Any]]) -> str:
    """A caution about few runs; "" if every method has three."""
    few = any(len(group.results) < _FEW for group in group_runs(results))
    return "Few runs are no proof: repeat with other seeds before you choose." if few else ""


def _of_one(result: Mapping[str, Any]) -> str:
    subject = str(result.get("algorithm", "The run"))
    if (workers := result.get("workers")) is not None:
        subject += f" with {workers_text(workers)}"
    goal, time_s, wall_s = target_text(result), figure(result, "time_to_target_s"), figure(result, "wall_s")
    if time_s is not None and not failed(result):
        return f"{subject} reached {goal} after {seconds_text(time_s)}."
    after = f" after {seconds_text(wall_s)}" if wall_s is not None else ""
    missed = f" without reaching {goal}" if time_s is None and goal != "the target" else ""
    reason = str(result.get("outcome_reason") or "").strip().rstrip(".")
    did = result["outcome"] if failed(result) else "ended"
    return f"{subject} {did}{after}{missed}{f': {reason}' if reason else ''}."


def _values(groups: Sequence[Group], *path: str) -> list[tuple[float, str]]:
    """Medians of the methods that ended well and have this figure, the lowest first."""
    return sorted(
        (value, group.label) for group in groups if not group.failed and (value := group.median(*path)) is not None
    )


def _ranked(values: list[tuple[float, str]], of: int, first_did: str, did: str, text: Callable[[float], str]) -> str:
    (best, first), *others = values
    if not others:
        return f"{'Only ' if of > 1 else ''}{first} {did}: {text(best)}{'' if of > 1 else ' (median)'}."
    close = [label for value, label in values if value <= best * CLEAR_RATIO]
    if len(close) > 1:
        return f"{few(close)} {first_did}, within 5 % of each other ({text(best)}): too close to name a winner."
    second, label = others[0]
    times = f"{second / best:.2f}" if second < 2 * best else number_text(second / best, 2)
    return f"{first} {first_did}: {text(best)}; the next, {label}: {text(second)}, {times} times as much."
