"""What a study asked, which method won, and what to run next; everything else is in the report's tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.observe.words import counted, few, joined
from paceline.study.findings import AS_PRINTED, Comparison, interval_text, times_text
from paceline.study.limits import is_number
from paceline.study.statistics import MIN_PAIRS
from paceline.study.trials import METHOD, NOT_SET, Trials, factor_text, level_text

__all__ = ["asked", "headline", "next_steps"]

_MANY_PAIRS = 400


def asked(trials: Trials, study: Mapping[str, Any]) -> str:
    """What was tried, in one sentence; the study's own question before it."""
    varied = {name: levels for name, levels in trials.factors.items() if name != "algorithm"}
    algorithms = trials.factors.get("algorithm", [])
    parts = [f"{len(algorithms)} algorithms"] if algorithms else []
    parts += [f"{factor_text(name)} {_levels_text(levels)}" for name, levels in varied.items()]
    parts.append(f"{counted(_num_seeds(trials), 'seed')} each")
    task = f" of {study['task']}" if study.get("task") else ""
    backend = " in the simulator" if study.get("backend") == "simulator" else ""
    question = str(study.get("question") or "").strip()
    return f"{question + ' ' if question else ''}{counted(len(trials), 'trial')}{task}{backend}: {joined(parts)}."


def headline(trials: Trials, comparisons: Sequence[Comparison]) -> str:
    """Which method won, by how much and how surely; `comparisons` as `compare_everything` makes them, of `trials.primary`."""
    if not len(trials):
        return "The study has no trials yet: run it with paceline study run."
    if trials.failed.all() and np.isnan(trials.values(trials.primary.column)).all():
        return "No winner: every trial diverged or crashed."
    leader, overall = _leader(trials, comparisons)
    verdict = _verdict(trials, leader, overall)
    if not _nothing_reached(trials):
        return verdict
    return f"No run reached even {trials.fractions[0]} % of its initial loss. By speed: {verdict}"


def _verdict(trials: Trials, leader: str, overall: list[Comparison]) -> str:
    measure = trials.primary
    if not overall:
        return _without_pairs(trials)
    beaten = sorted((one for one in overall if one.found and one.centre > 1), key=lambda one: one.centre)
    unsure = [one.base for one in overall if one not in beaten]
    unmet = [method for method in trials.methods if method not in {leader, *(one.base for one in overall)}]
    apart = f"; not compared, as no trials differ in the method alone: {few(unmet)}" if unmet else ""
    if not beaten:
        ahead = all(one.centre >= 1 for one in overall) and any(one.centre > 1 for one in overall)
        why = f"{leader} was not surely ahead of {few(unsure)}" if ahead else "no method was ahead of all others"
        return f"No winner: {why}{apart}."
    did = "trained" if measure.kind == "throughput" else f"reached {measure.goal}"
    ahead_of = few([_than(one) for one in beaten])
    behind = f"; not surely ahead of {few(unsure)}" if unsure else ""
    return f"{leader} {'led' if unsure or unmet else 'won'}: it {did} {ahead_of}{behind}{apart}."


def _leader(trials: Trials, comparisons: Sequence[Comparison]) -> tuple[str, list[Comparison]]:
    """The method that was sooner than most others over all pairs, and its comparisons: above 1 means that it was sooner."""

    def of(method: str) -> list[Comparison]:
        mine = [
            one for one in comparisons if one.factor == METHOD and not one.where and method in (one.base, one.other)
        ]
        return [one if one.other == method else one.flipped for one in mine]

    def score(method: str) -> tuple[int, float]:
        ratios = [min(max(one.centre, 1e-6), 1e6) for one in of(method)]
        return sum(ratio > 1 for ratio in ratios), sum(map(math.log, ratios))

    leader = max(trials.methods, key=score, default="")
    return leader, of(leader)


def _than(one: Comparison) -> str:
    bracket = f"({interval_text(one.ratio)}, {one.ratio.pairs} pairs)"
    if math.isinf(one.ratio.at_least):
        return f"where {one.base} never arrived in most pairs {bracket}"
    how = "as many samples per second as" if one.measure.kind == "throughput" else "sooner than"
    return f"{times_text(one.ratio)} {how} {one.base} {bracket}"


def _without_pairs(trials: Trials) -> str:
    """Of one method, or of methods without a single pair."""
    measure, values = trials.primary, trials.values(trials.primary.column)
    known = values[~np.isnan(values)]
    if len(trials.methods) > 1:
        return "No two trials differ in the method alone: compare methods by a grid or a one-at-a-time design."
    if not len(known):
        return "The trials ended without anything to compare."
    low, high = (f"{end:,.3g}" for end in (known.min(), known.max()))
    span = f"{low if low == high else f'{low} to {high}'} {measure.unit}"
    if measure.kind == "throughput":
        said = f"trials trained on {span}"
    else:
        said = f"{len(known)} of {counted(len(trials), 'trial')} reached {measure.goal}, after {span}"
    return f"{said[:1].upper()}{said[1:]}.{' One run is no proof.' if len(trials) == 1 else ''}"


def _nothing_reached(trials: Trials) -> bool:
    has_losses = not np.isnan(trials.values("train_loss")).all()
    return trials.primary.kind == "throughput" and bool(trials.fractions) and has_losses


def _num_seeds(trials: Trials) -> int:
    return len(set(trials.column_of["seed"].tolist()))


def next_steps(trials: Trials, comparisons: Sequence[Comparison]) -> list[tuple[str, str, str]]:
    """Rows of a table: of what more is needed, how much, and why."""
    if not len(trials):
        return []
    leader, overall = _leader(trials, comparisons)
    seeds, measure = _num_seeds(trials), trials.primary
    rows = []
    if seeds < MIN_PAIRS:
        why = "fewer pairs of one setting have no interval that holds for any distribution of times"
        rows.append(("seeds", f"{MIN_PAIRS} or more, not {seeds}", why))
    if _nothing_reached(trials):
        rows.append(("time", "longer trials", "no run reached a target"))
    elif measure.kind != "throughput":
        stopped = ~trials.times(measure).reached & ~trials.failed
        if stopped.mean() > 0.1:
            why = f"{int(stopped.sum())} of {len(trials)} trials were stopped before {measure.goal}"
            rows.append(("time", "a higher limit", why))
    rows += [
        ("levels", f"beyond {level}", f"the last that was tried, and the best of {leader}")
        for level in _best_at_edges(trials, leader)
    ]
    return [*rows, *_pairs_needed(overall)]


def _best_at_edges(trials: Trials, leader: str) -> list[str]:
    """Levels of numeric factors that are the best for the leader and the last that were tried."""
    times = trials.times(trials.primary)
    found = []
    for factor in trials.others:
        levels = trials.factors[factor]
        if factor.startswith("cluster"):  # what a machine is like is no choice
            continue
        if not all(map(is_number, levels)):
            continue
        mine = {level: times.high[trials.rows({METHOD: leader, factor: level})] for level in levels}
        # A method may lack levels: `sequential` runs with one worker at most.
        medians = {level: float(np.median(known)) for level, known in mine.items() if len(known)}
        if len(medians) < 2 or not np.isfinite(list(medians.values())).any():
            continue
        best = min(medians, key=lambda level: medians[level])
        if best in (min(medians), max(medians)) and not (factor in ("workers", "batch_size") and best == 1):
            found.append(level_text(factor, best))
    return found


def _pairs_needed(overall: list[Comparison]) -> list[tuple[str, str, str]]:
    """How many pairs the closest open comparison would take, from the width of its interval."""
    unsettled = [
        one
        for one in overall
        if one.testable
        and not one.found
        and one.ratio.complete == one.ratio.pairs
        and one.ratio.low > 0
        and math.isfinite(one.ratio.high)
    ]
    if not unsettled:
        return []
    one = max(unsettled, key=lambda one: abs(math.log(one.centre)))
    effect, half = abs(math.log(one.centre)), math.log(one.ratio.high / one.ratio.low) / 2
    needed = math.inf if effect <= math.log(AS_PRINTED) else 1.3 * one.ratio.pairs * (half / effect) ** 2
    if needed > _MANY_PAIRS:
        return [("pairs", "no more", f"{one.other} and {one.base} are as good as equal here")]
    needed = max(needed, 1.3 * one.ratio.pairs)
    pairs = f"about {math.ceil(needed / 5) * 5}, not {one.ratio.pairs}"
    return [("pairs", pairs, f"to settle {one.other} against {one.base}")]


def _levels_text(levels: Sequence[Any]) -> str:
    texts = [f"{level:g}" if isinstance(level, float) else str(level) for level in levels if level != NOT_SET]
    return ", ".join(texts) if len(texts) <= 8 else f"{texts[0]} to {texts[-1]} ({len(texts)} levels)"
