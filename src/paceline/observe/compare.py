"""Comparing runs: their labels, repeats of one method, and clear differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.observe.words import percent_text, workers_text

__all__ = [
    "CLEAR_RATIO",
    "Group",
    "clearly_best",
    "evaluated_notes",
    "failed",
    "figure",
    "group_runs",
    "run_labels",
    "target_text",
]

CLEAR_RATIO = 1.05  # two single runs with a smaller ratio count as equal: repeats of one setting differ by as much
_DISTINGUISHING = ("workers", "task", "backend")


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one method: the same algorithm, workers, task and backend, usually with different seeds."""

    label: str
    members: tuple[int, ...]
    results: tuple[Mapping[str, Any], ...]

    @property
    def failed(self) -> bool:
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


def evaluated_notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence per run whose evaluation did not use the newest parameters."""
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
    """The target of a result as text."""
    parts = []
    if (loss := figure(result, "target_loss")) is not None:
        parts.append(f"loss of {loss:.4g}")
    if (accuracy := figure(result, "target_accuracy")) is not None:
        parts.append(f"test accuracy of {percent_text(accuracy)}")
    return "the target " + " or ".join(parts) if parts else "the target"
