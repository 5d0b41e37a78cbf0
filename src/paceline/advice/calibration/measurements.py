"""The parts of a calibration: single times, links, steps and memory, and their evaluation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import theilslopes

from paceline.errors import PacelineError
from paceline.simulator.hardware.core import COPY_VECTORS
from paceline.simulator.hardware.cores import Cold

SMALL_BYTES = 100  # a message whose time is latency
COOLING_S = np.geomspace(1e-4, 0.1, 61)  # candidates for the best fit

ColdSteps = Mapping[float, Sequence[tuple[float, float]]]
"""By the seconds of a pause, pairs: what a step took after it, and one soon afterwards that followed another at once."""


@dataclass(frozen=True)
class Quartiles:
    """Single measurements of one time: their median and quartiles."""

    median_s: float
    low_s: float
    high_s: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Quartiles:
        """The quartiles of at least one value."""
        low, median, high = (float(one) for one in np.percentile(values, [25, 50, 75]))
        return cls(median, low, high, len(values))

    def __str__(self) -> str:
        unit, name = next(
            ((u, n) for u, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if self.median_s >= u), (1e-9, "ns")
        )
        median, low, high = (f"{one / unit:.3g}" for one in (self.median_s, self.low_s, self.high_s))
        return f"{median} {name} (middle half {low} to {high}, {self.count} times)"


@dataclass(frozen=True)
class Link:
    """A message of b bytes takes `latency_s + b / bandwidth_bytes_per_s` from one program to another."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def without_copy(self, core_bytes_per_s: float) -> float:
        """Its bytes per second without the sender's copy, a byte read and one written, which a simulation models itself."""
        s_per_byte = 1 / self.bandwidth_bytes_per_s
        return 1 / max(s_per_byte - 2 / core_bytes_per_s, s_per_byte / 10)


@dataclass(frozen=True)
class Effort:
    """The duration of measurements."""

    steps: int = 50  # at least, for each batch size
    steps_s: float = 2.0
    copies_s: float = 1.0
    repeats: int = 200  # of operations that take microseconds
    large_repeats: int = 20
    large_bytes: tuple[int, ...] = (1_000_000, 2_000_000, 4_000_000, 8_000_000)
    slices_s: float = 1.0
    codec_s: float = 0.2  # of each
    pauses_s: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03)
    pauses: int = 5  # at least, of each length


QUICK = Effort(
    steps=10, steps_s=0.1, copies_s=0.05, slices_s=0.1, codec_s=0.02, repeats=20, large_repeats=12,
    large_bytes=(1_000_000, 4_000_000), pauses_s=(0.001, 0.003, 0.01), pauses=2,
)  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """Steps of a task on this machine."""

    task: str
    batch_size: int  # of the step that the cluster describes
    vector_bytes: int
    compute_s: dict[int, np.ndarray]  # by batch size, every step's time without its update, in order
    update_s: np.ndarray  # one plain SGD step of the optimizer, each


@dataclass(frozen=True)
class MemoryTimes:
    """Memory times of one machine, in seconds."""

    copy_s: Quartiles  # a copy of one vector, by one process alone
    crowded_copies_s: list[Quartiles]  # the same for each of several processes that copy at once
    atomic_s: Quartiles  # one addition to a word that two processes add to
    wake_s: Quartiles  # from a word's change until a process that slept on it runs

    def figures(self, vector_bytes: int) -> dict[str, float]:
        """Fields of a `Cluster` that follow from the times, by name."""
        rate = COPY_VECTORS * vector_bytes / self.copy_s.median_s
        crowded = sum(COPY_VECTORS * vector_bytes / one.median_s for one in self.crowded_copies_s)
        return {
            "core_bytes_per_s": rate,
            "bus_bytes_per_s": max(rate, crowded),
            "atomic_s": self.atomic_s.median_s,
            "wake_s": max(0.0, self.wake_s.median_s),
        }

    def spreads(self) -> dict[str, Quartiles]:
        return {
            "copy of the parameters": self.copy_s,
            f"copy, {len(self.crowded_copies_s)} at once": self.crowded_copies_s[0],
            "atomic addition": self.atomic_s,
            "wake-up": self.wake_s,
        }


def named_quartiles(
    compute_s: Mapping[int, Quartiles], update_s: Quartiles, memory: MemoryTimes | None
) -> dict[str, Quartiles]:
    """All measurements of one worker on its own, by name."""
    steps = {f"step without update, batch {size}": times_s for size, times_s in compute_s.items()}
    return steps | {"update": update_s} | (memory.spreads() if memory is not None else {})


def fit_cold(steps: ColdSteps, few: ColdSteps) -> Cold:
    """The cost of coming back from a pause: medians of the pairs' differences, by least squares over `COOLING_S`.

    Args:
        steps: with batches of the usual size.
        few: with so few samples that computing ends before the extra time of the pause is used up.
    """
    pauses_s = np.array(list(steps))
    longer_s = np.array([statistics.median(after_s - at_once_s for after_s, at_once_s in steps[one]) for one in steps])
    gone = 1.0 - np.exp(-pauses_s[:, None] / COOLING_S)
    fitted_s = longer_s @ gone / (gone**2).sum(0)
    best = int(np.argmin(((longer_s[:, None] - fitted_s * gone) ** 2).sum(0)))
    longest = float(pauses_s.max())
    factor = max(
        statistics.median(after_s / at_once_s for after_s, at_once_s in pairs)
        for pairs in (steps[longest], few[longest])
    )
    return Cold(cold_s=max(0.0, float(fitted_s[best])), cold_factor=max(1.0, factor), cooling_s=float(COOLING_S[best]))


def fit_link(round_trips_s: Mapping[int, Sequence[float]]) -> Link:
    """Latency and bandwidth of a link from median round trips by message bytes.

    Latency: half the round trip of the smallest message. Bandwidth: the median slope of half the other round trips over
    their bytes between any two sizes (Theil-Sen), so that one disturbed size has no effect.

    Raises:
        PacelineError: longer messages did not take longer.
    """
    medians_s = {num_bytes: statistics.median(times_s) / 2 for num_bytes, times_s in sorted(round_trips_s.items())}
    small, *large = medians_s
    s_per_byte: Any = theilslopes([medians_s[num_bytes] for num_bytes in large], large)[0]
    if s_per_byte <= 0:
        raise PacelineError(
            "Longer messages took no more time: the machine is too busy to measure; try again when it is idle."
        )
    return Link(medians_s[small], 1 / float(s_per_byte))


def rounded(value: float) -> float:
    """Rounds to six digits; more are noise."""
    return float(f"{value:.6g}")
