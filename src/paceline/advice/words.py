"""Names and sentences of advice that terminal, page and engine share; figures are in `tables.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.advice.answer import Advice, Candidate, Circumstances, Prediction, Target
from paceline.algorithms import registry
from paceline.observe.words import (
    counted,
    few,
    number_text,
    percent_text,
    seconds_text,
    span_text,
    whole_percent_text,
    workers_text,
)
from paceline.planner.estimate import CONFIDENCE, LogSpread

INTERVAL = f"{whole_percent_text(CONFIDENCE)} interval"


def label(candidate: Candidate) -> str:
    """In figures: `leashed · 2 workers`."""
    return f"{candidate.algorithm} \N{MIDDLE DOT} {workers_text(candidate.workers)}"


def name(candidate: Candidate) -> str:
    """In sentences: `leashed with 2 workers`."""
    return f"{candidate.algorithm} with {workers_text(candidate.workers)}"


def measure_name(target: Target) -> str:
    """The quantity that is compared with the target."""
    return "test accuracy" if target.accuracy is not None else "training loss"


def measure_text(target: Target, value: float) -> str:
    """A value of that quantity: `96.0 %` or `0.120`; "any" without an upper limit."""
    if not math.isfinite(value):
        return "any"
    return percent_text(value) if target.accuracy is not None else number_text(value)


def _target_text(target: Target) -> str:
    exactly = f"{target.loss:.6g}" if target.accuracy is None else f"{100 * target.accuracy:.6g} %"  # as it was asked
    return f"a {measure_name(target)} of {exactly}"


def _circumstances_text(circumstances: Circumstances) -> str:
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


def verdict(advice: Advice) -> str:
    """The recommended candidate and its prediction, or that none reaches the target."""
    target, best = advice.target, advice.best
    if best is None:
        why = f": {advice.reasons[0]}" if advice.reasons else "."
        return f"None of {len(advice.ranked)} candidates is expected to reach {_target_text(target)}{why}"
    parts = []
    if (found := best.at_deadline) is not None and target.deadline_s is not None:
        value, *ends = (measure_text(target, one) for one in (found.value, found.low, found.high))
        parts.append(
            f"a {measure_name(target)} of {value} ({INTERVAL} {' to '.join(ends)}) after {seconds_text(target.deadline_s)}"
        )
    if (time_s := best.time_s) is not None:
        span = span_text(time_s.low, time_s.high, seconds_text)
        parts.append(f"{_target_text(target)} after {seconds_text(time_s.value)} ({INTERVAL} {span})")
    return f"Take {name(best.candidate)}: {', and '.join(parts)}."


def remark(one: Prediction) -> str:
    """Why a candidate does not reach the target, or how it was extrapolated; "" if neither applies."""
    return "; ".join(filter(None, (one.why_not if one.time_s is None else "", one.extrapolation)))


def remarks(ranked: Sequence[Prediction]) -> list[str]:
    """Each remark with its candidates."""
    said: dict[str, list[str]] = {}
    for one in ranked:
        said.setdefault(remark(one).rstrip("."), []).append(name(one.candidate))
    return [f"{few(names)}: {text}." for text, names in said.items() if text]


def nothing_arrives(ranked: Sequence[Prediction], target: Target) -> str:
    """The best value of all candidates, none of which reaches the target."""
    bests = [(target.best(value for _, value in one.curve), one) for one in ranked]
    known = [(value, one) for value, one in bests if value is not None]
    if not known:
        why = next((one.why_not for one in ranked if one.why_not), "nothing could be simulated")
        return f"no candidate has a prediction; {name(ranked[0].candidate)}: {why}."
    value, best = (max if target.accuracy is not None else min)(known, key=lambda one: one[0])
    return f"the best reached {target.text(value)}, {name(best.candidate)}: {best.why_not or 'not in time'}."


def cautions(ranked: Sequence[Prediction]) -> list[str]:
    """Warnings if the first place is a close call, or asynchronous SGD does not pay off."""
    best, *others = ranked
    said = []
    near = [one for one in others if best.time_s and one.time_s and one.time_s.low <= best.time_s.high]
    if near:
        shown = few([name(one.candidate) for one in near])
        said.append(f"A close call: the intervals of {shown} overlap with that of {name(best.candidate)}.")
    asynchronous = next((one for one in ranked if _is_asynchronous(one.candidate)), None)
    if asynchronous is not None and best.arrives and not _is_asynchronous(best.candidate):
        said.append(
            f"Asynchronous SGD does not pay off here: {name(best.candidate)} ranks before {name(asynchronous.candidate)}."
        )
    return said


def _is_asynchronous(candidate: Candidate) -> bool:
    """Whether its workers apply possibly stale gradients one by one."""
    algorithm = registry.build(candidate.algorithm)
    return candidate.workers > 1 and not (algorithm.lockstep or algorithm.together)


def how_sure(best: Prediction, models: LogSpread | None, seeds: LogSpread | None) -> str:
    """The sources of the first candidate's interval."""
    said = [f"the first was simulated to the target {counted(sum(map(math.isfinite, best.simulated_s)), 'time')}"]
    if seeds is not None:
        said.append(f"seeds differ by {whole_percent_text(math.expm1(seeds.deviation))}")
    if models is not None:
        said.append(
            f"short real runs were within {whole_percent_text(math.expm1(models.deviation))} of simulated progress"
        )
    return f"How sure: {', '.join(said)}."
