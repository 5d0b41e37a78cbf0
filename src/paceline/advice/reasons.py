"""How sure the answer is, and what to mind, in sentences; the table has the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.advice.answer import Candidate, Fit, Prediction, Target
from paceline.advice.words import name
from paceline.algorithms import registry
from paceline.observe.words import counted, few, number_text, seconds_text, whole_percent_text
from paceline.planner.estimate import LogSpread

__all__ = ["close_calls", "how_sure", "not_asynchronous", "nothing_arrives"]


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


def how_sure(best: Prediction, fits: Sequence[Fit], models: LogSpread | None, seeds: LogSpread | None) -> str:
    """What the interval of the first is made of."""
    said = [f"the first was simulated to the target {counted(sum(map(math.isfinite, best.simulated_s)), 'time')}"]
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
            f"a number of workers left out of the convergence model is missed by a factor of {number_text(10**worst)} at most"
        )
    return f"How sure: {', '.join(said)}."
