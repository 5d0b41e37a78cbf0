"""The answer in plain sentences, computed from the figures; a report opens with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.observe.compare import (
    CLEAR_RATIO,
    Group,
    failed,
    figure,
    group_runs,
    target_text,
)
from paceline.observe.words import joined, number_text, percent_text, seconds_text, workers_text
from paceline.records.summary import FRACTIONS

__all__ = ["answer"]


def answer(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences that say what came out: who was soonest and by what ratio, who failed, how stale, how sure.

    Methods are compared by the time to the target if any reached it, else by the time to the smallest fraction of the
    initial loss that any reached, else by the final training loss. Medians where a method has several runs. Ratios
    below `CLEAR_RATIO` name no winner.
    """
    if not results:
        return ["There are no runs."]
    groups = group_runs(results)
    if len(results) == 1:
        return _single(results[0])
    if len({str(result.get("task")) for result in results}) > 1:
        return ["These runs trained different tasks, so their losses and times cannot be compared.", *_failures(groups)]
    sentences = _verdict(groups) if len(groups) > 1 else [_repeats(groups[0])]
    return [*sentences, *_failures(groups), *_why(groups), _caution(groups)]


def _single(result: Mapping[str, Any]) -> list[str]:
    name = str(result.get("algorithm", "The run"))
    workers = result.get("workers")
    subject = f"{name} with {workers_text(workers)}" if workers is not None else name
    time_s, steps = figure(result, "time_to_target_s"), figure(result, "steps_to_target")
    wall_s = figure(result, "wall_s")
    sentences = []
    if failed(result):
        sentences.append(f"{subject} {result['outcome']}{_after(wall_s)}{_because(result)}.")
        if time_s is not None:
            sentences.append(f"Before that it had reached {target_text(result)}, after {seconds_text(time_s)}.")
    elif time_s is not None:
        updates = f" and {number_text(int(steps))} updates" if steps is not None else ""
        sentences.append(f"{subject} reached {target_text(result)} after {seconds_text(time_s)}{updates}.")
    else:
        has_target = target_text(result) != "the target"
        missed = f" without reaching {target_text(result)}" if has_target else ""
        sentences.append(f"{subject} ended{_after(wall_s)}{missed}{_because(result)}.")
    loss, accuracy = figure(result, "train_loss"), figure(result, "test_accuracy")
    if loss is not None:
        ending = f", its last test accuracy {percent_text(accuracy)}" if accuracy is not None else ""
        sentences.append(f"Its training loss over the last 100 batches was {number_text(loss)}{ending}.")
    rate = figure(result, "samples_per_s")
    if rate is not None:
        sentences.append(f"It trained on {number_text(rate)} samples/s.")
    caution = "One run is no proof: another seed may do better or worse."
    return [*sentences, *_why([Group(name, (0,), (result,))]), caution]


def _after(wall_s: float | None) -> str:
    return f" after {seconds_text(wall_s)}" if wall_s is not None else ""


def _because(result: Mapping[str, Any]) -> str:
    reason = str(result.get("outcome_reason") or "").strip().rstrip(".")
    return f": {reason}" if reason else ""


def _repeats(group: Group) -> str:
    times = [value for result in group.results if (value := figure(result, "time_to_target_s")) is not None]
    total = len(group.results)
    if not times:
        return f"{group.label}: none of its {total} runs reached {target_text(group.results[0])}."
    reached = "all" if len(times) == total else f"{len(times)} of"
    return (
        f"{group.label}: {reached} {total} runs reached {target_text(group.results[0])}, "
        f"after {seconds_text(min(times))} to {seconds_text(max(times))}."
    )


def _verdict(groups: list[Group]) -> list[str]:
    fit = [group for group in groups if not group.failed]
    goals = [(("time_to_target_s",), f"reached {target_text(groups[0].results[0])}")]
    goals += [
        (("time_to_fraction_s", fraction), f"brought the training loss to {float(fraction) * 100:g} % of its start")
        for fraction in sorted(FRACTIONS, key=float)
    ]
    for path, did in goals:
        times = {group.label: time for group in fit if (time := group.median(*path)) is not None}
        if times:
            missed = [group.label for group in fit if group.label not in times]
            return [_soonest(times, did), *([f"{joined(missed)} did not get there."] if missed else [])]
    losses = {group.label: loss for group in fit if (loss := group.median("train_loss")) is not None}
    if not losses:
        return ["No run that ended well reported a loss, so the methods cannot be compared by it."]
    return [_lowest(losses)]


def _soonest(times: dict[str, float], did: str) -> str:
    (first, first_s), *others = sorted(times.items(), key=lambda item: item[1])
    if not others:
        return f"Only {first} {did}, after {seconds_text(first_s)}."
    close = [(label, time_s) for label, time_s in others if time_s <= first_s * CLEAR_RATIO]
    slower = [(label, time_s) for label, time_s in others if time_s > first_s * CLEAR_RATIO]
    if close:
        names = joined([first, *(label for label, _ in close)])
        times_text = joined([seconds_text(first_s), *(seconds_text(time_s) for _, time_s in close)])
        text = f"{names} {did} at about the same time ({times_text}): too close to name a winner"
        if not slower:
            return text + "."
        return text + f". {_ratios(slower, first_s)}."
    return f"{first} {did} soonest, after {seconds_text(first_s)}. {_ratios(slower, first_s)}."


def _ratios(slower: list[tuple[str, float]], first_s: float) -> str:
    return joined(
        [f"{label} took {_ratio(time_s / first_s)} times as long ({seconds_text(time_s)})" for label, time_s in slower]
    )


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 2 else number_text(ratio, 2)


def _lowest(losses: dict[str, float]) -> str:
    ranked = sorted(losses.items(), key=lambda item: item[1])
    (first, low), *others = ranked
    if not others:
        return f"Only {first} ended with a training loss: {number_text(low)}."
    close = [label for label, loss in others if loss <= low * CLEAR_RATIO]
    listed = ", ".join(f"{label} {number_text(loss)}" for label, loss in ranked)
    if close:
        return (
            f"{joined([first, *close])} ended with about the same training loss, too close to name a winner ({listed})."
        )
    return f"{first} ended with the lowest training loss ({listed})."


def _failures(groups: list[Group]) -> list[str]:
    sentences = []
    for group in groups:
        bad = [result for result in group.results if failed(result)]
        if not bad:
            continue
        count = "" if len(group.results) == 1 else f" in {len(bad)} of {len(group.results)} runs"
        sentences.append(f"{group.label} {bad[0]['outcome']}{count}{_because(bad[0])}.")
    return sentences


def _why(groups: list[Group]) -> list[str]:
    sentences = []
    staleness = _each(groups, ("staleness", "mean"), lambda mean: "0" if mean == 0 else number_text(mean, 2))
    if staleness:
        gossip = all(group.results[0].get("gossip") for group in groups)
        what = "Updates of its own model, averages included," if gossip else "Updates that others applied"
        sentences.append(f"{what} between a gradient's read and its own update: {staleness} on average.")
    waiting = _each(
        [group for group in groups if group.results[0].get("workers") != 1], ("waiting_share",), percent_text
    )
    if waiting:
        sentences.append(f"Share of their time that workers spent waiting: {waiting}.")
    lost = sum(len(result.get("workers_lost") or ()) for group in groups for result in group.results)
    if lost:
        sentences.append(f"{workers_text(lost)} {'were' if lost > 1 else 'was'} lost on the way.")
    return sentences


def _each(groups: list[Group], path: tuple[str, ...], text: Callable[[float], str]) -> str:
    """A figure of every method, or its range where there are too many to read in a sentence."""
    known = [(value, group.label) for group in groups if (value := group.median(*path)) is not None]
    if len(groups) == 1:
        return "".join(text(value) for value, _ in known)
    if len(known) > 3:
        (low, first), (high, last) = min(known), max(known)
        return f"from {text(low)} in {first} to {text(high)} in {last}"
    return ", ".join(f"{text(value)} in {label}" for value, label in known)


def _caution(groups: list[Group]) -> str:
    counts = [len(group.results) for group in groups]
    if max(counts) == 1:
        return "One run each is no proof: repeat with other seeds before you choose."
    if min(counts) < 3:
        return f"Medians of {_range(counts)} runs each: repeat with more seeds before you choose."
    return f"Medians of {_range(counts)} runs each."


def _range(counts: list[int]) -> str:
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
