"""Several runs side by side: what to call them, which belong together, and when a difference is clear."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ABSENT",
    "CLEAR_RATIO",
    "Group",
    "clearly_best",
    "evaluated_notes",
    "failed",
    "figure",
    "group_runs",
    "number_text",
    "percent_text",
    "run_labels",
    "seconds_text",
    "target_text",
    "workers_text",
]

CLEAR_RATIO = 1.05  # below this ratio two single runs count as equal: repeats of one setting differ by as much
ABSENT = "\N{EN DASH}"  # in place of a figure that does not exist
_DISTINGUISHING = ("workers", "task", "backend")


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one method: the same algorithm, workers, task and backend, usually with different seeds.

    Args:
        label: what tells this method from the others.
        members: places of its runs in the list given.
        results: their results.
    """

    label: str
    members: tuple[int, ...]
    results: tuple[Mapping[str, Any], ...]

    @property
    def failed(self) -> bool:
        """Whether most of its runs diverged or crashed."""
        return sum(map(failed, self.results)) * 2 > len(self.results)

    def median(self, *path: str) -> float | None:
        """Median of a figure; a run without it counts as infinite, so None means that half or more have none."""
        values = [math.inf if (value := figure(result, *path)) is None else value for result in self.results]
        median = statistics.median_high(values)
        return None if math.isinf(median) else median


def failed(result: Mapping[str, Any]) -> bool:
    """Whether the run diverged or crashed."""
    return result.get("outcome") in ("diverged", "crashed")


def figure(result: Mapping[str, Any], *path: str) -> float | None:
    """The number at `path` in a result, None if it is missing or not finite."""
    value: Any = result
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def group_runs(results: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Runs that differ at most in their seed, in order of first appearance."""
    members: dict[tuple[str, ...], list[int]] = {}
    for index, result in enumerate(results):
        key = (_algorithm(result), *(str(result.get(name)) for name in _DISTINGUISHING))
        members.setdefault(key, []).append(index)
    varying = [
        name
        for name in _DISTINGUISHING
        if len({str(result[name]) for result in results if result.get(name) is not None}) > 1
    ]
    groups = []
    for indices in members.values():
        first = results[indices[0]]
        parts = [_algorithm(first)]
        parts += [
            workers_text(first[name]) if name == "workers" else str(first[name])
            for name in varying
            if first.get(name) is not None
        ]
        groups.append(Group(" · ".join(parts), tuple(indices), tuple(results[index] for index in indices)))
    return groups


def workers_text(num_workers: int) -> str:
    """`1 worker`, `2 workers`."""
    return f"{num_workers} worker{'s' if num_workers != 1 else ''}"


def evaluated_notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on the runs of which not the newest parameters were evaluated."""
    return [
        f"{label}: the accuracy is that of a {result['evaluated']}."
        for label, result in zip(run_labels(results), results, strict=True)
        if result.get("evaluated")
    ]


def run_labels(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One distinct label per run: its method's, with the seed where a method has several runs."""
    labels = [""] * len(results)
    taken: set[str] = set()
    for group in group_runs(results):
        for index, result in zip(group.members, group.results, strict=True):
            label = group.label if len(group.members) == 1 else f"{group.label} · seed {result.get('seed', '?')}"
            distinct, number = label, 2
            while distinct in taken:
                distinct, number = f"{label} (#{number})", number + 1
            taken.add(distinct)
            labels[index] = distinct
    return labels


def _algorithm(result: Mapping[str, Any]) -> str:
    return str(result.get("algorithm", "unnamed"))


def clearly_best(values: Sequence[float | None], *, lower: bool) -> int | None:
    """Index of the value that beats every other by more than `CLEAR_RATIO`; None if there is none.

    A value alone is not best: there is nothing to compare it with.

    >>> clearly_best([1.0, 1.2, None], lower=True)
    0
    >>> clearly_best([1.0, 1.02], lower=True) is None
    True
    """
    known = sorted(((value, index) for index, value in enumerate(values) if value is not None), reverse=not lower)
    if len(known) < 2:
        return None
    (best, index), (second, _) = known[:2]
    low, high = (best, second) if lower else (second, best)
    return index if high > 0 and low >= 0 and high > low * CLEAR_RATIO else None


def target_text(result: Mapping[str, Any]) -> str:
    """The target in words, as far as the result tells it."""
    parts = []
    if (loss := figure(result, "target_loss")) is not None:
        parts.append(f"loss of {loss:.4g}")
    if (accuracy := figure(result, "target_accuracy")) is not None:
        parts.append(f"test accuracy of {percent_text(accuracy)}")
    return "the target " + " or ".join(parts) if parts else "the target"


def seconds_text(seconds: float) -> str:
    """A duration for prose.

    >>> [seconds_text(value) for value in (0.0123, 1.234, 99.96, 754, 7000)]
    ['12.3 ms', '1.23 s', '100 s', '12.6 min', '1.94 h']
    """
    if seconds < 0.9995:
        return f"{number_text(seconds * 1e3)} ms"
    if seconds < 600:
        return f"{number_text(seconds)} s"
    return f"{number_text(seconds / 60)} min" if seconds < 5400 else f"{number_text(seconds / 3600)} h"


def number_text(value: float | None, digits: int = 3) -> str:
    """About `digits` significant digits, thousands separated, never in exponent notation below a billion.

    >>> [number_text(value) for value in (0.012345, 1.5, 123.456, 22232.39, 1.5e10, 0)]
    ['0.0123', '1.50', '123', '22,232', '1.50e10', '0']
    """
    if value is None:
        return ABSENT
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -5 <= magnitude < 9:
        return f"{value:.{digits - 1}e}".replace("e+0", "e").replace("e+", "e")
    decimals = max(0, digits - 1 - magnitude)
    if round(abs(value), decimals) >= 10.0 ** (magnitude + 1):  # 9.996 is 10.0, not 10.00
        decimals = max(0, decimals - 1)
    return f"{value:,.{decimals}f}"


def percent_text(share: float | None) -> str:
    """A share as a percentage.

    >>> [percent_text(value) for value in (0.0012, 0.034, 0.5, 1, 0, 0.9512)]
    ['0.1 %', '3.4 %', '50.0 %', '100 %', '0 %', '95.1 %']
    """
    if share is None:
        return ABSENT
    return f"{share:.0%}".replace("%", " %") if share in (0, 1) else f"{100 * share:.1f} %"
