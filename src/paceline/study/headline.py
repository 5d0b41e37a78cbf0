"""A study's question, the winner, and the next command; the report's tables have everything else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.observe.document import markup
from paceline.observe.words import counted, joined
from paceline.records.run_data import is_number
from paceline.study.findings import AS_PRINTED, Comparison, interval_text, times_text
from paceline.study.statistics import MIN_PAIRS
from paceline.study.trials import METHOD, NOT_SET, Trials, factor_text, level_name, level_text

_MANY_PAIRS = 400


def asked(trials: Trials, study: Mapping[str, Any]) -> str:
    """The study's question, and a sentence on its trials."""
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
    """Which method won, by how much and how certainly; `comparisons` are `compare_everything`'s of `trials.primary`."""
    measure, (leader, overall) = trials.primary, _leader(trials, comparisons)
    beaten = sorted((one for one in overall if one.found and one.centre > 1), key=lambda one: one.centre)
    values = trials.values(measure.column)
    text = markup(
        "study/headline.txt",
        trials=trials,
        measure=measure,
        timed=measure.kind != "throughput",
        nothing_reached=_nothing_reached(trials),
        known=values[~np.isnan(values)],
        leader=leader,
        beaten=[_than(one) for one in beaten],
        unsure=[one.base for one in overall if one not in beaten],
        ahead=all(one.centre >= 1 for one in overall) and any(one.centre > 1 for one in overall),
        unmet=[one for one in trials.methods if overall and one not in {leader, *(other.base for other in overall)}],
    )
    return " ".join(text.split())


def _leader(trials: Trials, comparisons: Sequence[Comparison]) -> tuple[str, list[Comparison]]:
    """The method that was sooner than most others over all pairs, and its comparisons; above 1, it was sooner."""

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


def _nothing_reached(trials: Trials) -> bool:
    has_losses = not np.isnan(trials.values("train_loss")).all()
    return trials.primary.kind == "throughput" and bool(trials.fractions) and has_losses


def _num_seeds(trials: Trials) -> int:
    return len(set(trials.column_of["seed"].tolist()))


def next_steps(trials: Trials, comparisons: Sequence[Comparison]) -> list[tuple[str, str, str]]:
    """Rows of a table on further trials: what, how much, and why."""
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
            why = f"{int(stopped.sum())} of {len(trials)} trials stopped before {measure.goal}"
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
        if factor.startswith("cluster"):  # the user cannot choose the machine
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
    """How many pairs the closest open comparison needs, judged by the width of its interval."""
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
    texts = [level_name(level) for level in levels if level != NOT_SET]
    return ", ".join(texts) if len(texts) <= 8 else f"{texts[0]} to {texts[-1]} ({len(texts)} levels)"
