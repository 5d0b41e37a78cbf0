"""Why the first is first, in sentences made of the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.advice.answer import Candidate, Fit, Prediction, Target
from paceline.advice.ranking import LogSpread, best_value, value_text
from paceline.algorithms import registry
from paceline.observe.words import counted, seconds_text, whole_percent_text, workers_text

__all__ = ["close_calls", "name", "not_asynchronous", "nothing_arrives", "reasons"]

_FEW = 0.005  # shares below this are called equal


def name(candidate: Candidate) -> str:
    """In a sentence: `leashed with 2 workers`."""
    return f"{candidate.algorithm} with {workers_text(candidate.workers)}"


def reasons(
    ranked: Sequence[Prediction], target: Target, fits: Sequence[Fit], models: LogSpread | None, seeds: LogSpread | None
) -> tuple[str, ...]:
    """Three: why the first is first, what limits others and more workers, and how sure this is."""
    return (_first(ranked, target), _others(ranked), _sure(ranked[0], fits, models, seeds))


def nothing_arrives(ranked: Sequence[Prediction], target: Target) -> str:
    """One, where no candidate reaches the target: what the best came to."""
    known = [(value, one) for one in ranked if (value := best_value(one, target)) is not None]
    if not known:
        why = next((one.why_not for one in ranked if one.why_not), "nothing could be simulated")
        return f"nothing could be said of any candidate; of {name(ranked[0].candidate)}: {why}."
    value, best = (max if target.accuracy is not None else min)(known, key=lambda one: one[0])
    return f"the best came to {value_text(target, value)}, {name(best.candidate)}: {best.why_not or 'not in time'}."


def close_calls(ranked: Sequence[Prediction]) -> list[str]:
    """A sentence if the first cannot be told from others: their intervals hold its time."""
    best = ranked[0]
    if best.time_s is None:
        return []
    near = [one for one in ranked[1:] if one.time_s is not None and one.time_s.low <= best.time_s.high]
    if not near:
        return []
    shown = ", ".join(name(one.candidate) for one in near[:3])
    more = f" and {len(near) - 3} more" if len(near) > 3 else ""
    return [f"A close call: the intervals of {shown}{more} overlap with that of {name(best.candidate)}."]


def not_asynchronous(ranked: Sequence[Prediction]) -> list[str]:
    """A sentence where a candidate whose workers wait for each other, or are one, ranks before all that wait for nobody."""
    kinds = [_is_asynchronous(one.candidate) for one in ranked]
    if True not in kinds or False not in kinds or kinds.index(True) < kinds.index(False):
        return []
    waits, other = ranked[kinds.index(False)], ranked[kinds.index(True)]
    if waits.time_s is None and waits.at_deadline is None:
        return []
    said = f"Do not use asynchronous SGD here: the best of it, {name(other.candidate)}, "
    if other.time_s is None or waits.time_s is None:
        return [f"{said}ranks behind {name(waits.candidate)}."]
    takes = f"takes {seconds_text(other.time_s.value)}, {name(waits.candidate)} {seconds_text(waits.time_s.value)}"
    unsure = ", though their intervals overlap" if other.time_s.low <= waits.time_s.high else ""
    return [f"{said}{takes}{unsure}."]


def _is_asynchronous(candidate: Candidate) -> bool:
    """Whether its workers' updates are made at once, one by one, of gradients that may be late."""
    algorithm = registry.build(candidate.algorithm)
    return candidate.workers > 1 and not (algorithm.lockstep or algorithm.together)


def _first(ranked: Sequence[Prediction], target: Target) -> str:
    best = ranked[0]
    late = best.time_s is None or (target.deadline_s is not None and best.time_s.value > target.deadline_s)
    if best.at_deadline is not None and target.deadline_s is not None and late:
        what = value_text(target, best.at_deadline.value)
        return f"{name(best.candidate)} comes closest by the deadline: {what} after {seconds_text(target.deadline_s)}."
    said = f"{name(best.candidate)} is first: {_figures(best)}"
    second = next((one for one in ranked[1:] if one.time_s is not None and one.samples_to_target is not None), None)
    if second is None:
        return f"{said}; no other candidate arrives."
    return f"{said}; the next, {name(second.candidate)}: {_figures(second)}."


def _figures(one: Prediction) -> str:
    assert one.time_s is not None
    if one.samples_to_target is None:
        return f"it takes {seconds_text(one.time_s.value)}"
    return (
        f"{one.samples_to_target.value:,.0f} samples at {one.samples_per_s.value:,.0f} a second take"
        f" {seconds_text(one.time_s.value)}"
    )


def _others(ranked: Sequence[Prediction]) -> str:
    """Another algorithm against the first in its two factors, and the first's own with other numbers of workers."""
    best, said = ranked[0], []
    arrived = [one for one in ranked[1:] if one.time_s is not None and one.samples_to_target is not None]
    other = next((one for one in arrived if one.candidate.algorithm != best.candidate.algorithm), None)
    if other is not None:
        said.append(f"{name(other.candidate)} needs {_factors(other, best)}")
    own = sorted(
        (one for one in arrived if one.candidate.algorithm == best.candidate.algorithm),
        key=lambda one: one.candidate.workers,
    )
    more = next((one for one in own if one.candidate.workers > best.candidate.workers), None)
    fewer = next((one for one in reversed(own) if one.candidate.workers < best.candidate.workers), None)
    for one in filter(None, (more, fewer)):
        said.append(f"{workers_text(one.candidate.workers)} of {best.candidate.algorithm} need {_factors(one, best)}")
    if not said:
        return "There is nothing to compare it with."
    return f"Against the first, {', and '.join(said)}."


def _factors(one: Prediction, best: Prediction) -> str:
    if one.samples_to_target is None or best.samples_to_target is None:
        return "an unknown number of samples"
    samples = one.samples_to_target.value / best.samples_to_target.value
    speed = one.samples_per_s.value / best.samples_per_s.value
    needed = "as many samples" if abs(samples - 1) < _FEW else f"{samples:.2f} times as many samples"
    return f"{needed} at {'the same speed' if abs(speed - 1) < _FEW else f'{speed:.2f} times the speed'}"


def _sure(best: Prediction, fits: Sequence[Fit], models: LogSpread | None, seeds: LogSpread | None) -> str:
    said = []
    said.append(f"the first was simulated to the target {counted(sum(map(math.isfinite, best.simulated_s)), 'time')}")
    if seeds is not None:
        said.append(f"seeds differ by {whole_percent_text(math.expm1(seeds.deviation))}")
    if models is not None:
        said.append(
            f"short real runs were within {whole_percent_text(math.expm1(models.deviation))} of simulated progress"
        )
    own = next((one for one in fits if one.algorithm == best.candidate.algorithm), None)
    if own is not None and own.leave_one_out:
        worst = max(own.leave_one_out.values())
        said.append(
            f"a number of workers left out of the convergence model is missed by a factor of {10**worst:.2f} at most"
        )
    return f"How sure: {', '.join(said)}."
