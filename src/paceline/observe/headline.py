"""The outcome of one or several runs, in one sentence; the table below it has the figures."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.observe.compare import CLEAR_RATIO, failed, figure, method_labels, target_text
from paceline.observe.document import markup
from paceline.observe.words import number_text, seconds_text
from paceline.records.summary import FRACTIONS

__all__ = ["caution", "headline"]

_FEW = 3
_FRACTIONS = {
    ("time_to_fraction_s", one): f"brought the training loss to {float(one) * 100:g} % of its start"
    for one in sorted(FRACTIONS, key=float)
}


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
