"""The protocol of every comparison: which learning rates are tried, which one is used, and what is said of a method.

Pure functions of the runs that have been made, so that a measurement can be interrupted at any time: what to run next follows
from what there is. A cost is what a run took to the target (seconds, updates or samples); a run that did not arrive costs
infinity. The protocol in words: `docs/benchmark_protocol.md`.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline.system.machine import machine, versions

VERSION = 1  # in every record; runs of another protocol are not mixed with these
RUNS = 5  # least runs of a row, and of a learning rate
FACTOR = 2.0  # between two neighbouring rates
MOST_RATES = 8  # tried by each method: the same budget for all

Tried = Mapping[float, Mapping[int, float]]
"""Costs of one method's runs, by learning rate and seed."""


@dataclass(frozen=True)
class Rates:
    """What one method's runs say about its learning rates.

    Args:
        tried: costs by rate and seed.
        runs: how many seeds a rate needs.
    """

    tried: Tried
    runs: int = RUNS

    def next_trial(self, start: Sequence[float], most_rates: int = MOST_RATES) -> tuple[float, int] | None:
        """The next rate and seed to run; None once the search is complete or its budget is spent.

        A rate with a run that did not arrive cannot be used, so its other seeds are left out.
        """
        for rate in sorted({*start, *self.tried}):
            made = self.tried.get(rate, {})
            missing = [seed for seed in range(self.runs) if seed not in made]
            if missing and math.inf not in made.values():
                return rate, missing[0]
        lowest, highest = min(self.tried), max(self.tried)
        if len(self.tried) >= most_rates:
            return None
        if self.used is None:  # too high, or too low: both sides in turn
            down = round(math.log(min(start) / lowest, FACTOR))
            up = round(math.log(highest / max(start), FACTOR))
            return (lowest / FACTOR if down <= up else highest * FACTOR), 0
        if self.used == highest:
            return highest * FACTOR, 0
        return (lowest / FACTOR, 0) if self.best == lowest else None

    @property
    def medians(self) -> dict[float, float]:
        """Median cost of each rate whose runs are complete and all arrived."""
        complete = {rate: list(costs.values()) for rate, costs in self.tried.items() if len(costs) >= self.runs}
        return {rate: median(costs) for rate, costs in sorted(complete.items()) if math.isfinite(max(costs))}

    @property
    def used(self) -> float | None:
        """The largest rate whose worst run reaches the target, so that no method runs at the edge of stability."""
        return max(self.medians, default=None)

    @property
    def best(self) -> float | None:
        """The rate with the least median cost, of those that can be used."""
        return min(self.medians, key=lambda rate: self.medians[rate], default=None)

    @property
    def at_edge(self) -> bool:
        """Whether the best value may lie outside the rates that were tried."""
        return self.best is None or self.best == min(self.tried) or self.used == max(self.tried)


class RatesAtEqualTime(Rates):
    """Of comparisons without a target, such as errors after equal time: the best rate is used, and must be inside the grid."""

    @property
    def used(self) -> float | None:
        """The rate with the least median cost."""
        return self.best


def trials(
    methods: Iterable[str], rates_of: Callable[[str], Rates], start: Sequence[float]
) -> Iterator[tuple[str, float, int]]:
    """The method, rate and seed of each missing run of all searches, the methods in turn; `rates_of` reads growing records."""
    searching = list(methods)
    while searching:
        for method in tuple(searching):
            trial = rates_of(method).next_trial(start)
            if trial is None:
                searching.remove(method)
            else:
                yield method, *trial


def interval(costs: Sequence[float]) -> tuple[float, float, float]:
    """Lowest and highest value of a confidence interval for the median, and its level.

    It is the narrowest pair of order statistics with a level of at least 90 %, or all values where there are too few: five
    runs give their lowest and highest, at 94 %. No distribution is assumed, so a run that did not arrive counts as infinity.
    """
    ordered, number = sorted(costs), len(costs)
    level = below = 0.0
    for cut in range((number + 1) // 2):
        below += math.comb(number, cut) / 2**number
        if cut and 1 - 2 * below < 0.9:
            return ordered[cut - 1], ordered[number - cut], level
        level = max(0.0, 1 - 2 * below)
    cut = (number - 1) // 2
    return ordered[cut], ordered[number - 1 - cut], level


def said(costs: Sequence[float], digits: int = 1, scale: float = 1.0) -> str:
    """`median (lowest to highest)` of the interval, with how many did not arrive; these count in the median."""
    if not costs:
        return "-"
    missed = sum(map(math.isinf, costs))
    if missed == len(costs):
        return "did not arrive"

    def text(value: float) -> str:
        return f"{value * scale:,.{digits}f}" if math.isfinite(value) else "never"

    low, high, _ = interval(costs)
    about = [f"{text(low)} to {text(high)}"] if len(costs) > 1 else []
    about += [f"{missed} of {len(costs)} did not arrive"] if missed else []
    return text(median(costs)) + (f" ({', '.join(about)})" if about else "")


def sooner(costs: Sequence[float], others: Sequence[float]) -> bool:
    """Whether a method is sooner than another, such as no communication, by more than both intervals."""
    return bool(costs) and bool(others) and interval(costs)[1] < interval(others)[0]


def transfer_s(num_bytes: float, rate_mbit: float) -> float:
    """The time that a link needs for so many bytes: no method that sends them arrives sooner."""
    return num_bytes * 8 / (rate_mbit * 1e6)


def perfect_sharing(speeds: Iterable[float]) -> float:
    """Time of workers of these speeds that share the work by speed, over that of equally many of speed 1."""
    speeds = list(speeds)
    return len(speeds) / sum(speeds)


def read(path: Path) -> list[Any]:
    """Runs that were finished earlier; a last line that was cut off does not count."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def append(path: Path, record: Any) -> None:
    """Writes down a run that is finished, in place of a last line that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(record).encode() + b"\n")


def stamp(pythons: Mapping[str, str]) -> dict[str, Any]:
    """What every record says of its making: the protocol, the machine, and all versions; of peers as `pythons` have them."""
    about, used = machine(), versions()
    made = f"{about['processor']}, {about['cores']} cores; Python {used['python']}, torch {used['torch']}"
    for system, python in pythons.items():
        ask = f"from importlib.metadata import version; print(version({system!r}))"
        answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
        made += f", {system} {answer.stdout.strip()}"
    return {"protocol": VERSION, "made_on": made}


def made_on(records: Iterable[Mapping[str, Any]], earlier: str) -> str:
    """Machines and versions of all runs; `earlier` is that of runs whose records do not name theirs."""
    return "; ".join(dict.fromkeys(record.get("made_on", earlier) for record in records))


def other_protocol(records: Iterable[Mapping[str, Any]]) -> bool:
    """Whether there are runs of another protocol: a new measurement must not go on from them."""
    return any(record.get("protocol") != VERSION for record in records)


def refusal(path: Path) -> str:
    """Why a measurement does not go on from a file."""
    return f"{path} has runs of another protocol: begin a new file (--runs FILE), or remove this one, which git keeps."
