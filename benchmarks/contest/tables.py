"""The head to head's tables: medians over the repetitions, with their interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import protocol
from protocol import Rates, said

from contest.methods import CONTROLS, LEADING, METHODS

Record = dict[str, Any]

DISTURBED = ", disturbed"  # after the scene of a run that does not count
SCENES = {
    "none": "Equally fast workers",
    "slow": "One worker {factor:g} times as slow",
    "killed": "One worker killed halfway",
}


def of(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Records with these values."""
    return [one for one in records if all(one.get(key) == value for key, value in wanted.items())]


def times(records: Iterable[Record]) -> list[float]:
    """Seconds to the target; infinite where it was not reached."""
    return [math.inf if (value := one.get("time_to_target_s")) is None else value for one in records]


def rates_of(records: Iterable[Record], method: str, runs: int = protocol.RUNS) -> Rates:
    """What part of its samples each undisturbed run of a method took to reach the target, by rate and seed."""
    tried: dict[float, dict[int, float]] = {}
    for one in of(records, scene="tune", method=method):
        share = one.get("share_of_run")
        tried.setdefault(one["learning_rate"], {})[one["seed"]] = math.inf if share is None else share
    return Rates(tried, runs)


def goodputs(records: Iterable[Record], undisturbed: Sequence[Record]) -> list[float]:
    """Useful samples per second as fractions of the same system's undisturbed median; 0 for what did not finish."""
    if not undisturbed:
        return []
    full = median(one.get("goodput", 0.0) if one["finished"] else 0.0 for one in undisturbed)
    return [one["goodput"] / full if one["finished"] and full else 0.0 for one in records]


def time_ratios(records: Iterable[Record], undisturbed: Sequence[Record]) -> list[float]:
    """Times for all samples over the same system's undisturbed median; infinite for what did not finish."""
    finished = [one["wall_s"] for one in undisturbed if one["finished"]]
    if not finished:
        return []
    full = median(finished)
    return [one["wall_s"] / full if one["finished"] else math.inf for one in records]


def table(records: Sequence[Record], scene: str, target: float) -> list[str]:
    """One scene's table in Markdown; the fastest to the target first."""
    ours = of(records, scene=scene)
    disturbed = scene != "none"
    head = ["method", "of", f"seconds to {target:g}", "final accuracy, %"]
    head += ["time for all samples, times undisturbed", "goodput, % of undisturbed"] if disturbed else ["samples/s"]
    head += ["what it took to go on"] if scene == "killed" else []
    rows = [_line(head), _line(["---"] * len(head))]
    names = [name for name in METHODS if of(ours, method=name)]
    by_time: Callable[[str], float] = lambda name: median(times(of(ours, method=name)))  # noqa: E731
    for name in sorted(names, key=by_time):
        own, full = of(ours, method=name), of(records, scene="none", method=name)
        cells = [name, METHODS[name].system, said(times(own), 1)]
        cells.append(said([one["final_accuracy"] for one in own if one["finished"]], 1, 100))
        if disturbed:
            cells += [said(time_ratios(own, full), 2), said(goodputs(own, full), 0, 100)]
        else:
            cells.append(said([one["goodput"] for one in own if one["finished"]], 0))
        if scene == "killed":
            cells.append(", ".join(sorted({one.get("after_kill") or "everything lost" for one in own})))
        rows.append(_line(cells))
    return rows


def lead(records: Sequence[Record], scene: str) -> tuple[float, str, float] | None:
    """Our leading method's median time to the target, the fastest peer and its; None where one of the two is missing."""
    own = of(records, scene=scene, method=LEADING)
    peers = {
        name: median(times(of(records, scene=scene, method=name)))
        for name, method in METHODS.items()
        if method.system != "Paceline" and name not in CONTROLS and of(records, scene=scene, method=name)
    }
    if not own or not peers:
        return None
    fastest = min(peers, key=lambda name: peers[name])
    return median(times(own)), fastest, peers[fastest]


def median_run(records: Sequence[Record], scene: str, method: str) -> Record | None:
    """The run whose time to the target is the median, of an even number the faster of the two in the middle; for pictures."""
    own = [one for one in of(records, scene=scene, method=method) if one.get("curve")]
    own.sort(key=lambda one: math.inf if one["time_to_target_s"] is None else one["time_to_target_s"])
    return own[(len(own) - 1) // 2] if own else None


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
