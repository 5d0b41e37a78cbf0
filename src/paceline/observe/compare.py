"""Comparing runs: their labels, repeats of one method, and clear differences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe.words import percent_text, workers_text

__all__ = [
    "CLEAR_RATIO",
    "clearly_best",
    "evaluated_notes",
    "failed",
    "figure",
    "method_labels",
    "run_labels",
    "target_text",
]

CLEAR_RATIO = 1.05  # two single runs with a smaller ratio count as equal: repeats of one setting differ by as much
_DISTINGUISHING = ("workers", "task", "backend")


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


def method_labels(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The method of each run: its algorithm, and workers, task and backend if these vary; not the seed."""
    known = {
        name: {str(result[name]) for result in results if result.get(name) is not None} for name in _DISTINGUISHING
    }
    varying = [name for name, values in known.items() if len(values) > 1]

    def label(result: Mapping[str, Any]) -> str:
        found = {name: result[name] for name in varying if result.get(name) is not None}
        parts = [workers_text(value) if name == "workers" else str(value) for name, value in found.items()]
        return " · ".join([str(result.get("algorithm", "unnamed")), *parts])

    return list(map(label, results))


def evaluated_notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence per run whose evaluation did not use the newest parameters."""
    return [
        f"{label}: the accuracy is that of a {result['evaluated']}."
        for label, result in zip(run_labels(results), results, strict=True)
        if result.get("evaluated")
    ]


def run_labels(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One distinct label per run: its method's, with the seed where a method has several runs."""
    methods = method_labels(results)
    runs = Counter(methods)
    seeds = (f" · seed {result.get('seed', '?')}" for result in results)
    labels = [one + (seed if runs[one] > 1 else "") for one, seed in zip(methods, seeds, strict=True)]
    repeats = (labels[:at].count(label) for at, label in enumerate(labels))
    return [f"{one} (#{number + 1})" if number else one for one, number in zip(labels, repeats, strict=True)]


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
