"""Comparison of runs: labels, clear differences, and a one-sentence headline."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.observe.document import markup
from paceline.observe.words import number_text, percent_text, seconds_text, workers_text
from paceline.records.summary import FRACTIONS

_FEW = 3
_FRACTIONS = {
    ("time_to_fraction_s", one): f"brought the training loss to {float(one) * 100:g} % of its start"
    for one in sorted(FRACTIONS, key=float)
}
CLEAR_RATIO = 1.05  # runs with a smaller ratio count as equal: repeats of one setting differ by as much
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
    """One distinct label per run: its method's, with the seed if the method has several runs."""
    methods = method_labels(results)
    runs = Counter(methods)
    seeds = (f" · seed {result.get('seed', '?')}" for result in results)
    labels = [one + (seed if runs[one] > 1 else "") for one, seed in zip(methods, seeds, strict=True)]
    repeats = (labels[:at].count(label) for at, label in enumerate(labels))
    return [f"{one} (#{number + 1})" if number else one for one, number in zip(labels, repeats, strict=True)]


def clearly_best(values: Sequence[float | None], *, lower: bool) -> int | None:
    """Index of the value that beats every other by more than `CLEAR_RATIO`; None if there is none.

    A single value is not the best: it has no competitor.

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


def headline(results: Sequence[Mapping[str, Any]]) -> str:
    """The best method and its lead, or how the only run ended.

    Methods are compared by the time to the target if any reached it, else by the time to the smallest fraction of the
    initial loss that any reached, else by the final training loss. Uses medians if a method has several runs. Ratios
    below `CLEAR_RATIO` name no winner.
    """
    target = target_text(results[0] if results else {})
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for label, result in zip(method_labels(results), results, strict=True):
        groups.setdefault(label, []).append(result)
    times = {("time_to_target_s",): f"reached {target}", **_FRACTIONS}
    goals: list[tuple[tuple[str, ...], str, str, Callable[[float], str]]]
    goals = [(path, did, f"{did} soonest", seconds_text) for path, did in times.items()]
    goals.append((("train_loss",), "ended with a training loss", "ended with the lowest training loss", number_text))
    ranked = ((_values(groups, *path), did, best_did, text) for path, did, best_did, text in goals)
    values, did, best_did, text = next((one for one in ranked if one[0]), ([], "", "", number_text))
    said = markup(
        "observe/headline.txt",
        results=results,
        target=target,
        figure=figure,
        failed=failed,
        tasks=len({str(result.get("task")) for result in results}),
        methods=len(groups),
        values=values,
        texts=[text(value) for value, _ in values],
        close=[label for value, label in values if value <= values[0][0] * CLEAR_RATIO],
        did=did,
        best_did=best_did,
    )
    return " ".join(said.split())


def _values(groups: Mapping[str, Sequence[Mapping[str, Any]]], *path: str) -> list[tuple[float, str]]:
    """Medians of the methods most of whose runs ended well and have this figure, the lowest first."""
    known = []
    for label, results in groups.items():
        values = [math.inf if (value := figure(result, *path)) is None else value for result in results]
        median = statistics.median_high(values)
        if median < math.inf and sum(map(failed, results)) * 2 <= len(results):
            known.append((median, label))
    return sorted(known)


def caution(results: Sequence[Mapping[str, Any]]) -> str:
    """A caution about few runs; "" if every method has three."""
    few = min(Counter(method_labels(results)).values(), default=_FEW) < _FEW
    return "Few runs are no proof: repeat with other seeds before you choose." if few else ""
