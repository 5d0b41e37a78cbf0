"""What `deepdist.py` makes of its trainings: tables of losses against time and bytes, and which claims hold."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["WHAT_HOLDS", "Curve", "losses_at", "median", "said", "until", "verdicts"]


WHAT_HOLDS = (
    "DeepDist is sooner than one gradient over all rows per job at the losses that it reaches before the other is ended."
    " Against one pass of each partition per job, then the mean, it depends on the problem: DeepDist is sooner at the low"
    " losses of digits; the mean is sooner at the first losses of MNIST, and sends fewer bytes wherever both are told"
    " apart. Where DeepDist took longer than the others were given, or sent more than they had by then, nothing can be"
    " told. Updates at the end alone are the control without communication. Three seeds, and learning rates by one seed"
    " each; the raw runs are not in the repository, so this page cannot be recomputed without new ones."
)


@dataclass
class Curve:
    """One training: what it had after each update.

    Args:
        times_s: from its start.
        num_bytes: sent so far, by all.
        losses: on all rows that it trains on.
        accuracy: at its end, on the others, in %.
        info: what else is said of it.
    """

    times_s: np.ndarray
    num_bytes: np.ndarray
    losses: np.ndarray
    accuracy: float
    info: dict[str, float]

    def of(self, what: str) -> np.ndarray:
        """`time` in s, or `bytes` in MB (n,)."""
        return self.times_s if what == "time" else self.num_bytes / 1e6

    def first(self, target: float, of: np.ndarray) -> float:
        """Where of (n,), the times or the bytes, the loss is first at the target; infinite: nowhere."""
        reached = np.flatnonzero(self.losses <= target)
        return float(of[reached[0]]) if len(reached) else float("inf")

    def on_the_way(self, times_s: tuple[float, ...]) -> float:
        """The geometric mean of the losses at some times."""
        losses = np.array([self.at(one, self.times_s) for one in times_s])
        return float(np.exp(np.log(np.maximum(losses, 1e-9)).mean()))

    def at(self, where: float, of: np.ndarray) -> float:
        """The loss there; the last one after the end."""
        return float(self.losses[max(0, int(np.searchsorted(of, where, side="right")) - 1)])


def until(targets: tuple[float, ...], curves: dict[str, list[Curve]]) -> list[str]:
    """Time and bytes until each target: each seed's."""
    lines = [
        "Seconds, and MB, of each seed; - where it was not reached.",
        "",
        "| method | " + " | ".join(f"loss {target:g}: s | MB" for target in targets) + " |",
        "|---" * (1 + 2 * len(targets)) + "|",
    ]
    for name, runs in curves.items():
        cells = []
        for target in targets:
            for what in ("time", "bytes"):
                cells.append(", ".join(reached(one.first(target, one.of(what))) for one in runs))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def verdicts(targets: tuple[float, ...], own: str, curves: dict[str, list[Curve]]) -> list[str]:
    """What holds of `own` against the others: it is sooner where its slowest seed is sooner than the other's fastest.

    A training that ended before it was at a loss is known to need more than it had by then, and nothing else.
    """
    lines = []
    for what in ("time", "bytes"):
        for other in [name for name in curves if name != own]:
            cells = []
            for target in targets:
                of = [[one.first(target, one.of(what)) for one in curves[name]] for name in (own, other)]
                cells.append(f"{target:g}: {verdict(*of, [float(one.of(what)[-1]) for one in curves[other]])}")
            lines.append(f"- {own} against {other}, by {what} until a loss of {'; '.join(cells)}.")
    return lines


def verdict(own: list[float], theirs: list[float], ended: list[float]) -> str:
    """In words; `ended` is what each of the other's trainings had taken when it ended."""
    if np.isinf(max(own)):
        return "does not hold, it does not get there with every seed"
    least = [end if np.isinf(one) else one for one, end in zip(theirs, ended, strict=True)]
    if np.isinf(max(theirs)) and max(own) >= min(least):
        return "cannot be told, the other was ended before it had taken as much"
    if np.isinf(min(theirs)):
        return "holds, the other is not there when it ends"
    times = median(theirs) / median(own)
    if max(own) < min(theirs):
        return (
            "holds, the other is not there with every seed when it ends"
            if np.isinf(times)
            else f"holds, {times:.1f} times"
        )
    if max(theirs) < min(own):
        return f"does not hold, the other takes {times:.2f} times as much"
    return "not told apart"


def losses_at(curves: dict[str, list[Curve]], what: str, places: tuple[float, ...]) -> list[str]:
    """Medians over the seeds; in brackets where the training had ended by then."""
    unit = "s" if what == "time" else "MB"
    header = " | ".join(f"{place:g} {unit}" for place in places)
    lines = [f"| method | {header} |", "|---" * (1 + len(places)) + "|"]
    for name, runs in curves.items():
        cells = []
        for place in places:
            text = said(median(one.at(place, one.of(what)) for one in runs))
            cells.append(f"({text})" if median(one.of(what)[-1] for one in runs) < place else text)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def median(values: Any) -> float:
    """Of the seeds."""
    return float(statistics.median(values))


def said(loss: float) -> str:
    """A loss."""
    return "infinite" if np.isinf(loss) else f"{loss:.0f}" if loss >= 100 else f"{loss:.3f}"


def reached(value: float) -> str:
    """A time or bytes."""
    return "-" if np.isinf(value) else f"{value:.2f}"
