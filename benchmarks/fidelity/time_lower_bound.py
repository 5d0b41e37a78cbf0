"""Which methods reach a target soonest where workers are unequally fast, and how far from what is possible? Simulated.

    python benchmarks/fidelity/time_lower_bound.py --write

Claimed, as theory: whatever a method does, its time to a squared gradient norm is, up to constants, at least the minimum over
m of the harmonic mean of the m fastest workers' times, times 1 + S / m (Tyurin and Richtarik, NeurIPS 2023, arXiv:2305.12387);
Rennala SGD, Ringmaster ASGD, and synchronous SGD with the right number of backup workers (arXiv:2602.03802) come near it.
Every gradient is computed, time is simulated, and messages cost next to nothing, as in the papers. `--small` takes seconds.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from page import show
from worst_quadratic import NOISE_TO_TARGET, TARGET

import paceline as pl
from paceline.simulator import Cluster, Pareto
from paceline.tasks.base import keep_data

QUADRATIC = f"{Path(__file__).parent / 'worst_quadratic.py'}:worst_quadratic"
ASYNCHRONOUS = ("async", "ringmaster", "ringleader", "rescaled", "AD-PSGD")
TAIL = 1e-4  # of gradients, which take `ratio` times the shortest time or longer


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    workers: int = 16
    ratios: tuple[int, ...] = (10, 1000)
    profiles: tuple[str, ...] = ("one slow", "half slow", "square root", "heavy tails")
    numbers: tuple[int, ...] = ()  # of workers, half of them slow
    tries: int = 6  # steps that are tried, of every method, with equal workers
    more_tries: int = 3  # with others, from the best of those on
    seeds: tuple[int, ...] = (1, 2)  # at the best step; the tries are with seed 0
    gradients: int = 1_000  # at most, of a run
    accuracy: float = 0.85  # of digits-mlp


SMALL = Size(
    workers=2, ratios=(10,), profiles=("half slow",), tries=2, more_tries=1, seeds=(1,), gradients=250, accuracy=0.2
)


@dataclass(frozen=True)
class Method:
    """A row: its name, and its spec for so many workers, of which `most` are worth waiting for."""

    name: str
    spec: Callable[[int, int], str]


BATCH = round(NOISE_TO_TARGET)  # in whose mean noise is as large as the target
METHODS = (
    Method("lockstep", lambda n, most: "lockstep"),
    Method("sync, backups", lambda n, most: f"parameter-server(mode=sync(backups={n - most}))"),
    Method("async", lambda n, most: "parameter-server(mode=async)"),
    Method("rennala", lambda n, most: f"parameter-server(mode=rennala(gradients={BATCH}))"),
    Method("ringmaster", lambda n, most: f"parameter-server(mode=ringmaster(threshold={BATCH}))"),
    Method("ringleader", lambda n, most: "parameter-server(mode=ringleader)"),
    Method("rescaled", lambda n, most: "parameter-server(mode=async(rate=rescaled))"),
    Method("AD-PSGD", lambda n, most: "ad-psgd"),
)


def times(profile: str, ratio: float, n: int) -> list[float]:
    """Each worker's time per gradient, the fastest 1, ascending; with heavy tails what is expected of the m-th to be ready."""
    match profile:
        case "one slow":
            return [1.0] * (n - 1) + [float(ratio)]
        case "half slow":
            return [1.0] * (n - n // 2) + [float(ratio)] * (n // 2)
        case "square root":
            return [1.0 + (ratio - 1.0) * math.sqrt(i / max(1, n - 1)) for i in range(n)]
        case _:
            drawn = np.random.default_rng(0).pareto(tail(ratio).shape, (4_000, n)) + 1.0
            return np.sort(drawn, axis=1).mean(axis=0).tolist()


def tail(ratio: float) -> Pareto:
    """Every gradient anew takes 1 or longer, one in 10,000 `ratio` or longer."""
    return Pareto(least_s=1.0, shape=-math.log(TAIL) / math.log(ratio))


def cluster(profile: str, ratio: float, n: int) -> Cluster:
    """Those workers, and messages of a millionth."""
    if profile == "heavy tails" and ratio > 1:
        return Cluster(workers=n, compute_s=tail(ratio), latency_s=1e-6)
    slowness = tuple((worker, factor) for worker, factor in enumerate(times(profile, ratio, n)) if factor > 1)
    return Cluster(workers=n, compute_s=1.0, slowness=slowness, latency_s=1e-6)


def bound(times_s: Sequence[float], scale: float, noise: float) -> float:
    """The line's time: K min over m of the harmonic mean of the m fastest (1 + S / m)."""
    speeds = np.cumsum(1.0 / np.asarray(times_s))
    m = np.arange(1, len(speeds) + 1)
    return float(np.min(scale * m / speeds * (1 + noise / m)))


def worth_waiting_for(times_s: Sequence[float], noise: float) -> int:
    """The m with which steps that wait for m workers come soonest: each takes as long as the m-th, and 1 + S / m are made."""
    m = np.arange(1, len(times_s) + 1)
    return int(np.argmin(np.asarray(times_s) * (1 + noise / m))) + 1


@dataclass(frozen=True)
class Outcome:
    """Where a run came to."""

    reached_s: float  # inf: it did not
    value: float  # where it ended: the squared norm, or 1 - accuracy; inf where it diverged

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better."""
        return self.reached_s, self.value


class Bench:
    """Runs, on one task.

    Args:
        size: how much.
        task: the quadratic, or a built-in one.
        first_rate: where every method's search begins.
    """

    def __init__(self, size: Size, task: str, first_rate: float) -> None:
        self.size, self.task, self.first_rate = size, task, first_rate
        self.is_quadratic = task == QUADRATIC
        self.limit = size.gradients if self.is_quadratic else 2 * size.gradients
        self.runs = 0
        self._found: dict[tuple[str, Cluster], tuple[float, float]] = {}

    def run(self, spec: str, machines: Cluster, rate: float, seed: int) -> Outcome:
        """One run to the target, or to its end."""
        n, gradients = machines.workers, max(self.limit, 25 * machines.workers)
        every = max(4, n // 4)
        os.environ["WORST_QUADRATIC_EVERY"] = str(every)
        epochs = gradients / (4 * every) if self.is_quadratic else gradients * 8 / 1437
        config = pl.TrainConfig(
            task=self.task,
            algorithm=spec,
            epochs=epochs,
            learning_rate=rate,
            seed=seed,
            target_accuracy=1.0 if self.is_quadratic else self.size.accuracy,
        )
        run = pl.simulate_task(config, cluster=machines)
        self.runs += 1
        last = run.evaluations[-1]
        value = last["test_loss"] if self.is_quadratic else 1 - last["test_accuracy"]
        if run.result["outcome"] != "converged":
            return Outcome(math.inf, value if value is not None and math.isfinite(value) else math.inf)
        return Outcome(run.result["wall_s"], value)

    def best(
        self, spec: str, machines: Cluster, first_rate: float | None = None, tries: int | None = None
    ) -> tuple[float, float]:
        """As of `_best`, once: all profiles are alike where workers are."""
        if (spec, machines) not in self._found:
            rate = self.first_rate if first_rate is None else first_rate
            self._found[spec, machines] = self._best(spec, machines, rate, tries or self.size.tries)
        return self._found[spec, machines]

    def _best(self, spec: str, machines: Cluster, first_rate: float, tries: int) -> tuple[float, float]:
        """The mean time with the best constant step, and that step: the same number of tries for every method.

        From the first rate, steps are halved or doubled, whichever helps, by factors of 4 while nothing arrives; what tries
        are left when both neighbours are worse goes to the factors' roots between.
        """
        found: dict[float, Outcome] = {}

        def at(rate: float) -> Outcome:
            if rate not in found:
                found[rate] = self.run(spec, machines, rate, 0)
            return found[rate]

        at(first_rate)
        factor = 2.0
        while len(found) < tries:
            centre = min(found, key=lambda rate: found[rate].rank)
            step = 2 * factor if not math.isfinite(found[centre].reached_s) else factor
            lower, higher = centre / step, centre * step
            known = [any(math.isclose(one, rate) for rate in found) for one in (lower, higher)]
            if all(known):
                factor = math.sqrt(factor)
                continue
            at(lower if not known[0] and (known[1] or centre <= first_rate) else higher)
        rate = min(found, key=lambda rate: found[rate].rank)
        if not math.isfinite(found[rate].reached_s):
            return math.inf, rate
        again = [self.run(spec, machines, rate, seed).reached_s for seed in self.size.seeds]
        return statistics.fmean(again), rate


def fitted(bench: Bench) -> tuple[float, float, list[tuple[int, float]]]:
    """K and S of K (1 + S / n), by least squares on lockstep's times with n equal workers; and those times."""
    points = []
    n = 1
    while n <= bench.size.workers * 2:
        points.append((n, bench.best("lockstep" if n > 1 else "sequential", Cluster(workers=n, compute_s=1.0))[0]))
        n *= 2
    known = [(n, time_s) for n, time_s in points if math.isfinite(time_s)]
    rows = np.array([[1.0, 1.0 / n] for n, _ in known]) / np.array([[time_s] for _, time_s in known])
    (scale, with_noise), *_ = np.linalg.lstsq(rows, np.ones(len(known)), rcond=None)
    scale = max(float(scale), 1e-9)
    return scale, max(0.0, float(with_noise)) / scale, points


def text(value: float) -> str:
    """A time, or that there is none."""
    return (
        f"{value:,.0f}" if math.isfinite(value) and value >= 9.95 else f"{value:.1f}" if math.isfinite(value) else "-"
    )


@dataclass
class Table:
    """A profile's figures: by method and column the time and its step."""

    title: str
    columns: list[str]
    times: dict[str, list[float]]
    rates: dict[str, list[float]]
    line: list[float]

    def lines(self) -> list[str]:
        """As markdown."""
        has_line = any(map(math.isfinite, self.line))
        lines = ["", f"## {self.title}", "", "| method | " + " | ".join(self.columns) + " |"]
        lines.append("|---" * (len(self.columns) + 1) + "|")
        for name, row in self.times.items():
            cells = [
                f"{text(time_s)} (step {rate:.2g})" if math.isfinite(time_s) else "-"
                for time_s, rate in zip(row, self.rates[name], strict=True)
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        if has_line:
            lines.append("| *lower bound's shape* | " + " | ".join(f"*{text(one)}*" for one in self.line) + " |")
        return lines


def table(bench: Bench, title: str, cells: Iterable[tuple[str, str, float, int]], line: tuple[float, float]) -> Table:
    """Every method in every cell: pairs of a column's heading and a profile, ratio and number of workers."""
    found = Table(title, [], {one.name: [] for one in METHODS}, {one.name: [] for one in METHODS}, [])
    for heading, profile, ratio, n in cells:
        times_s = times(profile, ratio, n)
        most = worth_waiting_for(times_s, line[1])
        found.columns.append(heading)
        has_line = bench.is_quadratic and (profile != "heavy tails" or ratio == 1)
        found.line.append(bound(times_s, *line) if has_line else math.nan)
        for method in METHODS:
            spec, known = method.spec(n, most), found.rates[method.name]
            start = (known[0], bench.size.more_tries) if known else (None, None)
            time_s, rate = bench.best(spec, cluster(profile, ratio, n), *start)
            found.times[method.name].append(time_s)
            found.rates[method.name].append(rate)
            print(title, heading, method.name, text(time_s), f"{rate:.3g}", bench.runs, file=sys.stderr, flush=True)
    return found


def controls(bench: Bench, slow: Table) -> list[str]:
    """What must be so, or the page shows nothing."""
    n, ratio = bench.size.workers, bench.size.ratios[-1]
    waits = slow.times["lockstep"][-1] / slow.times["lockstep"][0]
    rate = slow.rates["lockstep"][0]
    late = bench.run("parameter-server(mode=async)", cluster("half slow", ratio, n), 2 * rate, 0)
    ones = [("`lockstep` waits: half of the workers slow costs it", f"{waits:,.0f} times its time", waits > ratio / 2)]
    where = "does not arrive" if math.isinf(late.reached_s) else f"arrives after {text(late.reached_s)}"
    ones.append(
        (f"`async` at twice `lockstep`'s step of equal workers, {2 * rate:.2g},", where, math.isinf(late.reached_s))
    )
    return [
        f"Control: {what} {found}: {'as it must be' if good else 'NOT SO, so these figures show nothing'}."
        for what, found, good in ones
    ]


def answers(tables: Sequence[Table]) -> list[str]:
    """Where is asynchrony needed? Three sentences from the figures."""
    cells = [
        (one, k) for at, one in enumerate(tables) for k in range(len(one.columns)) if k or at in (0, len(tables) - 1)
    ]
    ahead = []
    for one, k in cells:
        soonest = min(ASYNCHRONOUS, key=lambda name: one.times[name][k])
        share = one.times["sync, backups"][k] / one.times[soonest][k]
        if share > 1.1:
            ahead.append((share, f"{one.title.lower()}, {one.columns[k]}: `{soonest}`, {share:.2f} times sooner"))
    where = "; ".join(said for _, said in sorted(ahead, reverse=True)[:4])
    plain = sum(one.times["async"][k] < 0.9 * one.times["sync, backups"][k] for one, k in cells)
    waits = sum(one.times["lockstep"][k] > 2 * one.times["sync, backups"][k] for one, k in cells)
    return [
        f"Of {len(cells)} cells, an asynchronous method is sooner by more than a tenth than synchronous SGD with the right"
        f" number of backups in {len(ahead)}{f' ({where})' if ahead else ''}.",
        f"Plain asynchronous SGD is so in {plain}; and without backups, synchronous SGD takes more than twice as long as with"
        f" them in {waits}.",
        "So where all workers draw from the same data, unequal speeds alone are no reason for asynchronous SGD:"
        " ask for backups first"
        if len(ahead) <= len(cells) / 4
        else "So unequal speeds are a reason for asynchronous SGD in the cells named, and elsewhere backups do as well",
    ]


def measured(size: Size) -> list[str]:
    """The page's lines."""
    n = size.workers
    with keep_data():
        quadratic = Bench(size, QUADRATIC, 0.4)
        scale, noise, points = fitted(quadratic)
        line = (scale, noise)
        equal = ("equal", "half slow", 1, n)
        tables = [
            table(
                quadratic,
                profile.capitalize(),
                [equal, *((f"{ratio:,} times", profile, ratio, n) for ratio in size.ratios)],
                line,
            )
            for profile in size.profiles
        ]
        several = [(f"{number:,} workers", "half slow", 10, number) for number in size.numbers]
        numbers = [table(quadratic, "Half of the workers 10 times slower", several, line)] if several else []
        digits = Bench(size, "digits-mlp", 0.2)
        ratios = [equal, *((f"{ratio:,} times", "half slow", ratio, n) for ratio in size.ratios[:1])]
        trained = table(digits, "Digits, half slow", ratios, line)
        checked = controls(quadratic, next(one for one in tables if one.title == "Half slow"))
    fits = ", ".join(f"{text(time_s)} with {number}" for number, time_s in points)
    lines = [
        "# Time to a target with unequal workers: every method, and the lower bound's shape",
        "",
        "Printed by `python benchmarks/fidelity/time_lower_bound.py`. Times are in gradients of the fastest worker; in"
        f" brackets the best constant step, of {size.tries} tried by every method with equal workers, and"
        f" {size.more_tries} from there on with others, with one seed; the time is the mean of {len(size.seeds)} further"
        " seeds. A dash: no step arrived within"
        f" {size.gradients:,} gradients of all workers together (twice as many for digits). {n} workers where nothing else is"
        " said; momentum 0.",
        "",
        "The problem is the papers' tridiagonal quadratic (`worst_quadratic.py`), from ||grad f||^2 = 1/16 to"
        f" {TARGET:g}, with noise sigma^2 of {NOISE_TO_TARGET:g} times that; `rennala`'s B and `ringmaster`'s R are {BATCH},"
        " by the papers' rule sigma^2 / epsilon; `backups` leaves the m workers for which (time of the m-th) (1 + S / m) is"
        " least. Start, size and noise are our own. In `square root` worker i of 0 to n - 1 takes"
        " 1 + (ratio - 1) sqrt(i / (n - 1)); with heavy tails every gradient anew takes a Pareto-distributed time, one in"
        " 10,000 the ratio or longer.",
        "",
        "*Lower bound's shape*: K min over m of (harmonic mean of the m fastest workers' times) (1 + S / m), with"
        f" K = {scale:.1f} and S = {noise:.1f} fitted to lockstep with equal workers ({fits}). It is a shape, not a bound of"
        " this problem: the theory's constants are not in it. Times that are drawn anew have another bound, and no line here.",
        *(line for one in tables for line in one.lines()),
    ]
    lines += [line for one in numbers for line in one.lines()]
    lines += trained.lines()
    lines += ["", f"Time to a test accuracy of {size.accuracy:.0%} with `digits-mlp`, batches of 8.", "", *checked]
    lines += ["", "## Where is asynchrony needed?", "", " ".join(answers([*tables, *numbers, trained])) + "."]
    return lines


def main() -> None:
    """Print the page."""
    show(measured(SMALL if "--small" in sys.argv else Size()), __file__)


if __name__ == "__main__":
    main()
