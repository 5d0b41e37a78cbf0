"""Texts of advice that terminal and report share: names, targets, times in one unit, the verdict and what to mind."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.advice.answer import Advice, Candidate, Circumstances, Prediction, Target
from paceline.algorithms import registry
from paceline.observe.words import (
    ABSENT,
    SECONDS_IN,
    counted,
    few,
    number_text,
    percent_text,
    seconds_text,
    span_text,
    whole_percent_text,
    workers_text,
)
from paceline.planner.estimate import CONFIDENCE, Estimate, LogSpread

INTERVAL = f"{whole_percent_text(CONFIDENCE)} interval"


def label(candidate: Candidate) -> str:
    """One candidate's name: `leashed · 2 workers`."""
    return f"{candidate.algorithm} \N{MIDDLE DOT} {workers_text(candidate.workers)}"


def name(candidate: Candidate) -> str:
    """In a sentence: `leashed with 2 workers`."""
    return f"{candidate.algorithm} with {workers_text(candidate.workers)}"


def measure_name(target: Target) -> str:
    """The figure that is compared with the target: a loss or an accuracy."""
    return "test accuracy" if target.accuracy is not None else "training loss"


def count_text(value: float) -> str:
    """A number for a cell, never wider than eight characters: `640,000`, `12.3 M`; a dash where it is not known."""
    if not math.isfinite(value):
        return ABSENT
    return f"{number_text(value / 1e6)} M" if value >= 9.995e6 else number_text(value)


def measure_text(target: Target, value: float) -> str:
    """A value of that figure: `96.0 %` or `0.120`; "any" without an upper limit."""
    if not math.isfinite(value):
        return "any"
    return percent_text(value) if target.accuracy is not None else number_text(value)


def _target_text(target: Target) -> str:
    exactly = f"{target.loss:.6g}" if target.accuracy is None else f"{100 * target.accuracy:.6g} %"  # as it was asked
    return f"a {measure_name(target)} of {exactly}"


def _circumstances_text(circumstances: Circumstances) -> str:
    """The circumstances, as the end of a sentence; "" without any."""
    parts = [f"worker {worker} takes {factor:g} times as long" for worker, factor in sorted(circumstances.slow.items())]
    if circumstances.kills_per_s:
        parts.append(f"each worker is killed every {seconds_text(1 / circumstances.kills_per_s)} on average")
    if circumstances.cluster is not None:
        parts.append(f"the machines are those of {circumstances.cluster}")
    return f", if {' and '.join(parts)}" if parts else ""


def asked(advice: Advice) -> str:
    """The question: target, deadline and circumstances."""
    deadline_s = advice.target.deadline_s
    by = "" if deadline_s is None else f" by {seconds_text(deadline_s)}"
    return f"{_target_text(advice.target)}{by}{_circumstances_text(advice.circumstances)}."


def _time_text(one: Estimate) -> str:
    """A time and its interval in prose: `12.3 s (90 % interval 10.1 to 15.0 s)`."""
    return f"{seconds_text(one.value)} ({INTERVAL} {span_text(one.low, one.high, seconds_text)})"


def seconds_in(unit: str, value_s: float | None) -> str:
    """A time as a number of that unit."""
    if value_s is None or math.isnan(value_s):
        return ABSENT
    return "never" if math.isinf(value_s) else number_text(value_s / SECONDS_IN[unit])


def span_in(unit: str, one: Estimate) -> str:
    """An interval in that unit, `10.1 to 15.0`."""
    return span_text(one.low / SECONDS_IN[unit], one.high / SECONDS_IN[unit])


def times_best(advice: Advice) -> list[float | None]:
    """How many times as long as the soonest each candidate takes, in the order of `ranked`; None: never."""
    times_s = [one.time_s.value if one.time_s is not None else None for one in advice.ranked]
    least_s = min((value for value in times_s if value), default=None)
    return [value / least_s if value is not None and least_s else None for value in times_s]


def relative_text(times: float | None) -> str:
    """`1.00`, `2.35`, `18`."""
    return ABSENT if times is None else f"{times:.2f}" if times < 9.995 else f"{times:,.0f}"


def verdict(advice: Advice) -> str:
    """The recommended candidate and its prediction, or that none reaches the target."""
    target, best = advice.target, advice.best
    if best is None:
        why = f": {advice.reasons[0]}" if advice.reasons else "."
        return f"None of {len(advice.ranked)} candidates is expected to reach {_target_text(target)}{why}"
    parts = []
    if best.at_deadline is not None and target.deadline_s is not None:
        found = best.at_deadline
        span = f"{measure_text(target, found.low)} to {measure_text(target, found.high)}"
        parts.append(
            f"a {measure_name(target)} of {measure_text(target, found.value)} ({INTERVAL} {span})"
            f" after {seconds_text(target.deadline_s)}"
        )
    if best.time_s is not None:
        parts.append(f"{_target_text(target)} after {_time_text(best.time_s)}")
    return f"Take {name(best.candidate)}: {', and '.join(parts)}."


def remarks(ranked: Sequence[Prediction]) -> list[str]:
    """Sentences on candidates that do not reach the target or are extrapolated, grouped by the reason."""
    said: dict[str, list[Candidate]] = {}
    for one in ranked:
        for text in (one.why_not if one.time_s is None else "", f"* {one.extrapolation}" if one.extrapolation else ""):
            if text:
                said.setdefault(text, []).append(one.candidate)
    return [
        f"{'* ' if text.startswith('* ') else ''}{few(list(map(name, of)))}: {text.removeprefix('* ').rstrip('.')}."
        for text, of in said.items()
    ]


def no_time(one: Prediction) -> str:
    """The cell of a candidate without a time: it does not reach the target, or was not measured."""
    return "not reached" if one.simulated_s or one.modelled_s is not None else "not measured"


def nothing_arrives(ranked: Sequence[Prediction], target: Target) -> str:
    """What the best candidate came to if none reaches the target."""
    bests = [(target.best(value for _, value in one.curve), one) for one in ranked]
    known = [(value, one) for value, one in bests if value is not None]
    if not known:
        why = next((one.why_not for one in ranked if one.why_not), "nothing could be simulated")
        return f"nothing could be said of any candidate; of {name(ranked[0].candidate)}: {why}."
    value, best = (max if target.accuracy is not None else min)(known, key=lambda one: one[0])
    return f"the best came to {target.text(value)}, {name(best.candidate)}: {best.why_not or 'not in time'}."


def close_calls(ranked: Sequence[Prediction]) -> list[str]:
    """A sentence if other candidates' intervals overlap with that of the first."""
    best = ranked[0]
    if best.time_s is None:
        return []
    near = [one for one in ranked[1:] if one.time_s is not None and one.time_s.low <= best.time_s.high]
    if not near:
        return []
    shown = few([name(one.candidate) for one in near])
    return [f"A close call: the intervals of {shown} overlap with that of {name(best.candidate)}."]


def not_asynchronous(ranked: Sequence[Prediction]) -> list[str]:
    """A sentence if a synchronous candidate, or a single worker, ranks before all asynchronous ones."""
    kinds = [_is_asynchronous(one.candidate) for one in ranked]
    if True not in kinds or False not in kinds or kinds.index(True) < kinds.index(False):
        return []
    waits, other = ranked[kinds.index(False)], ranked[kinds.index(True)]
    if not waits.arrives:
        return []
    said = f"Do not use asynchronous SGD here: the best of it, {name(other.candidate)}, "
    if other.time_s is None or waits.time_s is None:
        return [f"{said}ranks behind {name(waits.candidate)}."]
    takes = f"takes {seconds_text(other.time_s.value)}, {name(waits.candidate)} {seconds_text(waits.time_s.value)}"
    unsure = ", though their intervals overlap" if other.time_s.low <= waits.time_s.high else ""
    return [f"{said}{takes}{unsure}."]


def _is_asynchronous(candidate: Candidate) -> bool:
    """Whether its workers apply possibly stale gradients one by one."""
    algorithm = registry.build(candidate.algorithm)
    return candidate.workers > 1 and not (algorithm.lockstep or algorithm.together)


def how_sure(best: Prediction, models: LogSpread | None, seeds: LogSpread | None) -> str:
    """What the interval of the first is made of."""
    said = [f"the first was simulated to the target {counted(sum(map(math.isfinite, best.simulated_s)), 'time')}"]
    if seeds is not None:
        said.append(f"seeds differ by {whole_percent_text(math.expm1(seeds.deviation))}")
    if models is not None:
        said.append(
            f"short real runs were within {whole_percent_text(math.expm1(models.deviation))} of simulated progress"
        )
    return f"How sure: {', '.join(said)}."
