"""What a study says, in the order a reader asks: which method won, where it lost, who failed, what to run next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.observe.words import counted, joined, percent_text
from paceline.study.findings import AS_PRINTED, FALSE_DISCOVERIES, Comparison, interval_text, times_text
from paceline.study.statistics import MIN_PAIRS, share_estimate
from paceline.study.trials import METHOD, NOT_SET, OUTCOMES, Measure, Trials, factor_text, level_text, where_text

__all__ = ["Conclusions", "answer", "asked"]

_MOST_LISTED = 3
_MANY_PAIRS = 400


@dataclass(frozen=True, slots=True)
class Conclusions:
    """The answer in plain sentences.

    Args:
        verdict: which method won, by how much and how surely; first the one sentence that counts.
        lost: where the leading method was not the soonest.
        effects: what the other factors did.
        outcomes: who diverged, crashed or did not arrive.
        caution: how many comparisons were made, and what that means.
        next: what to run next.
    """

    verdict: list[str]
    lost: list[str]
    effects: list[str]
    outcomes: list[str]
    caution: list[str]
    next: list[str]


def asked(trials: Trials, study: Mapping[str, Any]) -> str:
    """What was tried, in one sentence; the study's own question before it."""
    varied = {name: levels for name, levels in trials.factors.items() if name != "algorithm"}
    parts = [f"{factor_text(name)} {_levels_text(levels)}" for name, levels in varied.items()]
    algorithms = trials.factors.get("algorithm", [])
    seeds = len(set(trials.column_of["seed"].tolist()))
    parts = ([f"{len(algorithms)} algorithms"] if algorithms else []) + parts
    parts.append(f"{counted(seeds, 'seed')} each")
    task = f" of {study['task']}" if study.get("task") else ""
    backend = " in the simulator" if study.get("backend") == "simulator" else ""
    count = counted(len(trials), "trial")
    question = str(study.get("question") or "").strip()
    return f"{question + ' ' if question else ''}{count}{task}{backend}: {joined(parts)}."


def answer(trials: Trials, comparisons: Sequence[Comparison]) -> Conclusions:
    """Put the sentences together; `comparisons` as `compare_everything` makes them, of `trials.primary`."""
    if not len(trials):
        return Conclusions(["The study has no trials yet."], [], [], [], [], ["Run it: paceline study run."])
    measure = trials.primary
    leader = _leader(trials, comparisons)
    overall = [one for one in _against_others(comparisons, leader) if not one.where]
    verdict = _verdict(trials, measure, leader, overall, comparisons)
    lost = _lost(leader, comparisons) if overall else []
    return Conclusions(
        verdict,
        lost,
        _effects(trials, comparisons),
        _outcomes(trials, measure),
        _caution(comparisons),
        _next(trials, measure, leader, overall),
    )


def _leader(trials: Trials, comparisons: Sequence[Comparison]) -> str:
    """The method that was sooner than most others over all pairs; the sooner by sum where that is equal."""

    def score(method: str) -> tuple[int, float]:
        ratios = [_bounded(one.centre) for one in _against_others(comparisons, method) if not one.where]
        return sum(ratio > 1 for ratio in ratios), sum(map(math.log, ratios))

    return max(trials.methods, key=score, default="")


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1e-6), 1e6)


def _against_others(comparisons: Sequence[Comparison], method: str) -> list[Comparison]:
    """Those of a method with another, seen from it: above 1 means that it was sooner."""
    return [
        one if one.other == method else one.flipped
        for one in comparisons
        if one.factor == METHOD and method in (one.base, one.other)
    ]


def _verdict(
    trials: Trials, measure: Measure, leader: str, overall: list[Comparison], comparisons: Sequence[Comparison]
) -> list[str]:
    if not overall:
        return _single(trials, measure)
    did, how = _did(measure)
    beaten = sorted((one for one in overall if one.found and one.centre > 1), key=lambda one: one.centre)
    open_ones = [one for one in overall if one not in beaten]
    prefix = [] if measure.kind != "throughput" or not trials.fractions else _nothing_reached(trials)
    met = {leader, *(one.base for one in overall)}
    unmet = [method for method in trials.methods if method not in met]
    apart = [
        f"No trial of {leader} differs in the method alone from one of {joined(unmet[:_MOST_LISTED])}: not compared."
    ]
    apart = apart if unmet else []
    if not beaten:
        if len(overall) == 1:
            return [*prefix, f"No winner: {overall[0].sentence}", *apart]
        names = _names(open_ones)
        clearest = [one for one in [_clearest(leader, trials, comparisons)] if one is not None]
        if any(one.centre < 1 for one in overall) or not any(one.centre > 1 for one in overall):
            return [*prefix, "No winner: of no method is it known that it was ahead of all others.", *clearest, *apart]
        most = "most" if measure.kind == "throughput" else "soonest in most pairs"
        return [
            *prefix,
            f"No winner: {leader} {did} {most}, but not surely before {names}.",
            *clearest,
            *(one.sentence for one in open_ones[:_MOST_LISTED]),
            *apart,
        ]
    ratios = _ratios(beaten, how, trials.baseline)
    won = "won" if not open_ones and not unmet else "led"
    verdict = [*prefix, f"{leader} {won}: it {did} {ratios}."]
    if (clearest := _clearest(leader, trials, comparisons)) is not None:
        verdict.append(clearest)
    if open_ones:
        verdict.append(f"It was not surely ahead of {_names(open_ones)}. {open_ones[0].sentence}")
    return [*verdict, *apart]


def _clearest(leader: str, trials: Trials, comparisons: Sequence[Comparison]) -> str | None:
    """Where the leader is surely ahead of most others, if it is not ahead of as many overall or by less."""
    places: dict[tuple[tuple[str, Any], ...], list[Comparison]] = {}
    for one in _against_others(comparisons, leader):
        if one.found and one.centre > 1 and len(one.where) <= 1:
            places.setdefault(one.where, []).append(one)

    def clarity(where: tuple[tuple[str, Any], ...]) -> tuple[int, float]:
        return len(places[where]), min(_bounded(one.centre) for one in places[where])

    best = max(places, key=clarity, default=())
    if not best:
        return None
    how = "the throughput of" if places[best][0].measure.kind == "throughput" else "sooner than"
    ahead = sorted(places[best], key=lambda one: one.centre)
    return f"It was clearest{where_text(best)}: {_ratios(ahead, how, trials.baseline)}."


def _ratios(beaten: list[Comparison], how: str, baseline: str) -> str:
    """By how much each was beaten; of many, the closest, and the baseline or else the last, and how many others."""
    if len(beaten) <= _MOST_LISTED:
        return joined([f"{_than(one, how)} ({_brackets(one)})" for one in beaten])
    named = next((one for one in beaten[1:] if one.base == baseline), beaten[-1])
    listed = joined([f"{_than(one, how)} ({_brackets(one)})" for one in (beaten[0], named)])
    return f"{listed}; {len(beaten) - 2} other methods were surely beaten, too"


def _names(comparisons: list[Comparison]) -> str:
    more = len(comparisons) - _MOST_LISTED
    names = [one.base for one in comparisons]
    return joined(names if more <= 1 else [*names[:_MOST_LISTED], f"{more} others"])


def _did(measure: Measure) -> tuple[str, str]:
    if measure.kind == "throughput":
        return "trained", "as many samples per second as"
    return f"reached {measure.goal}", "sooner than"


def _than(one: Comparison, how: str) -> str:
    if math.isinf(one.ratio.at_least):
        return f"where {one.base} never arrived in most pairs"
    return f"{times_text(one.ratio)} {how} {one.base}"


def _brackets(one: Comparison) -> str:
    missing = one.ratio.pairs - one.ratio.complete
    lacking = f", {missing} without both arrivals" if missing and one.measure.kind != "throughput" else ""
    return f"{interval_text(one.ratio)}, {one.ratio.pairs} pairs{lacking}"


def _nothing_reached(trials: Trials) -> list[str]:
    if np.isnan(trials.values("train_loss")).all():
        return []
    return [f"No run reached even {trials.fractions[0]} % of its initial loss, so speed is all there is to compare."]


def _single(trials: Trials, measure: Measure) -> list[str]:
    """Of one method, or of methods without a single pair."""
    times = trials.times(measure)
    values = trials.values(measure.column)
    known = values[~np.isnan(values)]
    said = []
    if len(trials.methods) > 1:
        said.append(
            "No two trials differ in the method alone, so the methods cannot be compared by pairs; use a grid or "
            "one-at-a-time design for that."
        )
    if measure.kind == "throughput":
        said += _nothing_reached(trials)
        if len(known):
            said.append(f"Trials trained on {_range(known)} samples per second.")
    else:
        count = len(trials)
        which = "The trial" if count == 1 else f"{int(times.reached.sum())} of {count} trials"
        said.append(f"{which} reached {measure.goal}, after {_range(known)} s.")
    if len(trials) == 1:
        said.append("One run is no proof: another seed may do better or worse.")
    return said or ["The trials ended without anything to compare."]


def _range(values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:,.3g}" if low == high else f"{low:,.3g} to {high:,.3g}"


def _effects(trials: Trials, comparisons: Sequence[Comparison]) -> list[str]:
    """The largest effect of each other factor; of fields that only some methods have, of each method."""
    largest: dict[tuple[Any, ...], Comparison] = {}
    for one in comparisons:
        if one.factor == METHOD or (one.where and one.factor not in trials.own_fields) or not one.found:
            continue
        known = largest.get((one.factor, *one.where))
        if known is None or one.leading.centre > known.leading.centre:
            largest[one.factor, *one.where] = one
    said = [
        one.sentence if one.factor == "algorithm" else one.sentence[:1].upper() + one.sentence[1:]
        for one in largest.values()
    ]
    named = {one.factor for one in largest.values()}
    said += [
        f"No effect of {factor_text(factor)} was found."
        for factor in [*trials.others, *trials.own_fields]
        if factor not in named and any(one.factor == factor and one.testable for one in comparisons)
    ]
    return said


def _lost(leader: str, comparisons: Sequence[Comparison]) -> list[str]:
    held = [one for one in _against_others(comparisons, leader) if one.where and one.testable]
    if not held:
        return []
    behind = [one for one in held if one.centre < 1]
    sure = sorted((one for one in behind if one.found), key=lambda one: (len(one.where), one.centre))
    if not behind:
        return [f"{leader} was behind in none of {len(held)} comparisons at single settings."]
    if not sure:
        return [
            f"{leader} lost surely nowhere: it was behind in {len(behind)} of {len(held)} comparisons at single settings, but "
            "each of their intervals includes 1 or does not hold among so many."
        ]
    said: list[Comparison] = []
    for one in sure:  # what is said of all batch sizes need not be said of each
        if not any(set(other.where) < set(one.where) and other.base == one.base for other in said):
            said.append(one)
    more = f" {len(said) - _MOST_LISTED} more are in the table." if len(said) > _MOST_LISTED else ""
    return [" ".join(one.sentence for one in said[:_MOST_LISTED]) + more]


def _outcomes(trials: Trials, measure: Measure) -> list[str]:
    said = []
    for outcome in OUTCOMES[2:]:
        parts = []
        for method in trials.methods:
            mine = trials.method_of == method
            count, total = int((trials.outcomes[mine] == outcome).sum()), int(mine.sum())
            if count:
                share = share_estimate(count, total)
                parts.append(
                    f"{count} of {total} of {method} ({percent_text(count / total)}, 95 % interval {100 * share.low:.0f} to "
                    f"{100 * share.high:.0f} %)"
                )
        if parts:
            said.append(f"{outcome.capitalize()}: {joined(parts)}.")
    if not said:
        said.append("No trial diverged or crashed.")
    if measure.kind != "throughput":
        reached = trials.times(measure).reached
        missing = [
            f"{int((~reached[mine]).sum())} of {int(mine.sum())} of {method}"
            for method in trials.methods
            if (~reached[mine := trials.method_of == method]).any()
        ]
        if missing:
            said.append(f"Did not reach {measure.goal}: {joined(missing)}. They count as later, not as missing.")
    return said


def _caution(comparisons: Sequence[Comparison]) -> list[str]:
    tested = sum(one.testable for one in comparisons)
    if not tested:
        return []
    found = sum(one.found for one in comparisons)
    are = "are findings" if found != 1 else "is a finding"
    return [
        f"{tested} comparison{'s were' if tested > 1 else ' was'} made at once, and {found} of them {are}: "
        f"the interval excludes 1, and among all findings at most {100 * FALSE_DISCOVERIES:.0f} % are false on average "
        "(Benjamini and Hochberg)."
    ]


def _next(trials: Trials, measure: Measure, leader: str, overall: list[Comparison]) -> list[str]:
    rules: list[Callable[[], str | None]] = [
        lambda: _more_seeds(trials, overall),
        lambda: _higher_limit(trials, measure),
        lambda: _beyond_edges(trials, measure, leader),
        lambda: _settle(overall),
    ]
    return [said for rule in rules if (said := rule()) is not None]


def _more_seeds(trials: Trials, overall: list[Comparison]) -> str | None:
    seeds = len(set(trials.column_of["seed"].tolist()))
    if seeds >= MIN_PAIRS:
        return None
    if not overall:
        return f"More seeds: {seeds} of each setting say little on chance; {MIN_PAIRS} or more allow intervals."
    return (
        f"At least {MIN_PAIRS} seeds: with {seeds}, a single setting has no interval that is free of assumptions on how times "
        "are distributed, and none at all where a run did not arrive."
    )


def _higher_limit(trials: Trials, measure: Measure) -> str | None:
    if measure.kind == "throughput":
        return "A longer study: no run reached a target." if _nothing_reached(trials) and trials.fractions else None
    stopped = ~trials.times(measure).reached & ~trials.failed
    if stopped.mean() <= 0.1:
        return None
    return f"A higher limit: {int(stopped.sum())} of {len(trials)} trials were stopped before {measure.goal}."


def _beyond_edges(trials: Trials, measure: Measure, leader: str) -> str | None:
    """Numeric factors whose best level for the leader is the last that was tried."""
    times = trials.times(measure)
    found = []
    for factor in trials.others:
        levels = trials.factors[factor]
        if factor.startswith("cluster"):  # what a machine is like is no choice
            continue
        if not all(isinstance(level, int | float) and not isinstance(level, bool) for level in levels):
            continue
        mine = [times.high[trials.rows({METHOD: leader, factor: level})] for level in levels]
        # A method may lack levels: `sequential` runs with one worker at most.
        levels = [level for level, known in zip(levels, mine, strict=True) if len(known)]
        medians = [float(np.median(known)) for known in mine if len(known)]
        if len(levels) < 2 or not np.isfinite(medians).any():
            continue
        at = int(np.argmin(medians))
        if at in (0, len(levels) - 1) and not (factor in ("workers", "batch_size") and levels[at] == 1):
            found.append(level_text(factor, levels[at]))
    if not found:
        return None
    edge = "is the last level tried" if len(found) == 1 else "are the last levels tried"
    best = "fastest" if measure.kind == "throughput" else "soonest"
    return f"Levels beyond the edge: {leader} was {best} with {joined(found)}, which {edge}."


def _settle(overall: list[Comparison]) -> str | None:
    """How many pairs the closest open comparison would take, from the width of its interval."""
    open_ones = [
        one
        for one in overall
        if one.testable
        and not one.found
        and one.ratio.complete == one.ratio.pairs
        and one.ratio.low > 0
        and math.isfinite(one.ratio.high)
    ]
    if not open_ones:
        return None
    one = max(open_ones, key=lambda one: abs(math.log(one.centre)))
    effect, half = abs(math.log(one.centre)), math.log(one.ratio.high / one.ratio.low) / 2
    needed = math.inf if effect <= math.log(AS_PRINTED) else 1.3 * one.ratio.pairs * (half / effect) ** 2
    if needed > _MANY_PAIRS:
        return f"Nothing on {one.other} against {one.base}: they are as good as equal here."
    needed = max(needed, one.ratio.pairs * 1.3)
    pairs = f"About {math.ceil(needed / 5) * 5} pairs rather than {one.ratio.pairs}"
    return f"{pairs} would settle {one.other} against {one.base}."


def _levels_text(levels: Sequence[Any]) -> str:
    levels = [level for level in levels if level != NOT_SET]
    texts = [f"{level:g}" if isinstance(level, float) else str(level) for level in levels]
    return ", ".join(texts) if len(texts) <= 8 else f"{texts[0]} to {texts[-1]} ({len(texts)} levels)"
