"""Measurements that repeat: raw values as they are made, one JSON object per line, and the tables of a page.

A row of a table is measured several times, ours and the peer's in turn, so that a change of the machine's speed meets both.
What is missing is measured, so that a measurement goes on after an interruption.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import protocol

OURS, PEER = "ours", "peer"


class Measurements:
    """A file of raw values.

    Args:
        path: the file, with one record per measurement.
        repeats: how often each row is measured.
    """

    def __init__(self, path: Path, repeats: int) -> None:
        self.repeats = repeats
        self._path, self._records = path, protocol.read(path)
        if protocol.other_protocol(self._records):
            sys.exit(protocol.refusal(path))
        self._stamp = protocol.stamp({})

    def measure(
        self, what: str, values: Callable[[int], Mapping[str, Any]], *, section: str, unit: str = "", target: str = ""
    ) -> None:
        """Measures a row until it has all its repeats; `values` gets the repeat's number, and returns values by name."""
        for number in range(sum(record["what"] == what for record in self._records), self.repeats):
            record = {
                "section": section,
                "what": what,
                "unit": unit,
                "target": target,
                "values": rounded(values(number)),
            }
            record |= {"load": round(os.getloadavg()[0], 1), **self._stamp}
            self._records.append(record)
            print(f"{what}: {record['values']}", flush=True)
            protocol.append(self._path, record)


def in_turn(**values: Callable[[], float]) -> Callable[[int], dict[str, float]]:
    """For `measure`: one function for each value; every second time the last goes first."""
    return lambda number: {name: values[name]() for name in (list(values) if number % 2 == 0 else reversed(values))}


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """With four digits."""
    return {name: float(f"{value:.4g}") for name, value in values.items()}


class Row:
    """All measurements of one row."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.what, self.unit, self.target = (records[0][name] for name in ("what", "unit", "target"))
        self.section = records[0]["section"]
        self._values = [record["values"] for record in records]

    def values(self, name: str) -> list[float]:
        """The values of a name, in order; empty if they were not measured."""
        return [values[name] for values in self._values if name in values]

    def said(self, name: str, digits: int = 0) -> str:
        """A median with its interval."""
        return protocol.said(self.values(name), digits)

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's, pair by pair."""
        return [ours / peer for ours, peer in zip(self.values(OURS), self.values(PEER), strict=True)]

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return median(self.ratios)


def rows(records: Iterable[dict[str, Any]]) -> list[Row]:
    """All rows, in the order in which they were begun."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        grouped.setdefault(record["what"], []).append(record)
    return [Row(group) for group in grouped.values()]


def made(records: list[dict[str, Any]], command: str, page: str) -> str:
    """The paragraph on how a page's measurements were made."""
    least = min(len(row.values(OURS)) for row in rows(records))
    busiest = max(record["load"] for record in records)
    return wrapped(
        f"{protocol.made_on(records, '')}. Medians of at least {least} measurements, ours and the peer's in turn; in brackets"
        f" an interval of at least 90 % for the median, or all values. Highest load average: {busiest:.1f}. Made by"
        f" `{command}`, which can be interrupted; `python benchmarks/pages.py {page}` makes this page from the measurements in"
        f" [{page}.jsonl]({page}.jsonl)."
    )


def wrapped(text: str) -> str:
    """A paragraph in lines."""
    return textwrap.fill(text, 125, break_long_words=False, break_on_hyphens=False)


def table(shown: Iterable[Row], ours: str, peer: str, digits: int = 0) -> list[str]:
    """Rows with ours, the peer's, their ratio and the target."""
    lines = [f"| what | {ours} | {peer} | ratio | target |", "|---|---|---|---|---|"]
    for row in shown:
        ratio = (
            f"**{median(row.ratios):.2f}** {protocol.said(row.ratios, 2).partition(' ')[2]}"
            if row.values(PEER)
            else "-"
        )
        unit = f" {row.unit}" if row.unit else ""
        theirs = row.said(PEER, digits) + unit if row.values(PEER) else "-"
        lines.append(f"| {row.what} | {row.said(OURS, digits)}{unit} | {theirs} | {ratio} | {row.target} |")
    return lines
