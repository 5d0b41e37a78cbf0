"""Placed models on real processes: two towers, a chain, one slow worker against all placements, simulated against measured.

    python benchmarks/placement.py [--rounds 5] [--steps 8] [--out FILE] [--small]

Prints a page and writes benchmarks/results/placement.md; takes some eight minutes, as every run starts processes. One intra-op
thread per worker. Each round runs all variants once, one after the other; the page has medians over the rounds, and ratios
within a round. As the machine's limit, two processes train a tower each without any placement in the same round: where that
gains nothing, other programs have the cores, and no figure here means anything.

Steps are timed twice: in an ordinary loop, from the beginning of one step to that of the next, with its optimizer; and one at
a time, after a barrier, from the first worker's beginning to the end of the last worker's backward pass, which is what a plan
simulates.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.system.machine import machine, versions

RESULTS = Path(__file__).parent / "results" / "placement.md"
SLOW = {1: 3.0}
LARGE = 4
"""The larger batch of the towers, in smaller ones: what a step has beside computing weighs less."""

FIXED, AGAIN = 10, 3
"""Placements that are compared with their simulation, and the best ones that are measured again next to the plan."""


@dataclass(frozen=True)
class Sizes:
    """Of images and convolutions."""

    batch: int = 16
    side: int = 32
    width: int = 24

    def images(self, number: int) -> torch.Tensor:
        """So many, at random."""
        return torch.randn(number, 3, self.side, self.side)

    def tower(self, depth: int, first: int = 3, *, ends: bool = True) -> nn.Sequential:
        """Convolutions of `first` channels and others after it; at its end, a pooled vector of 16 * width."""
        layers: list[nn.Module] = []
        for channels in [first, *[self.width] * depth]:
            layers += [nn.Conv2d(channels, self.width, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, *([nn.AdaptiveAvgPool2d(4), nn.Flatten()] if ends else []))

    def model(self, kind: str) -> nn.Module:
        """By name; alike in all processes."""
        torch.manual_seed(0)
        if kind in ("chain", "one tower"):
            return nn.Sequential(self.tower(6 if kind == "chain" else 4), nn.Linear(16 * self.width, 10))
        return Towers(self) if kind == "towers" else Unequal(self)

    def loader(self, steps: int) -> torch.utils.data.DataLoader:
        """So many batches."""
        data = torch.utils.data.TensorDataset(
            self.images(steps * self.batch), torch.randint(0, 10, (steps * self.batch,))
        )
        return torch.utils.data.DataLoader(data, batch_size=self.batch)


class Towers(nn.Module):
    """Two equal towers and a head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.a, self.b, self.head = sizes.tower(4), sizes.tower(4), nn.Linear(32 * sizes.width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (n, 3, side, side), scores (n, 10)."""
        return self.head(torch.cat([self.a(x), self.b(x)], 1))


class Unequal(nn.Module):
    """Three towers of 5, 3 and 2 convolutions, the first in two parts, and a head: 32 placements on two workers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.a1, self.a2 = sizes.tower(1, ends=False), sizes.tower(2, sizes.width)
        self.b, self.c = sizes.tower(2), sizes.tower(1)
        self.head = nn.Linear(48 * sizes.width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (n, 3, side, side), scores (n, 10)."""
        return self.head(torch.cat([self.a2(self.a1(x)), self.b(x), self.c(x)], 1))


PARTS = [(name, name) for name in ("a1", "a2", "b", "c", "head")]
"""Of the unequal model, what stays together."""


class Loop:
    """An ordinary loop of some steps, then as many with a barrier before each."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, steps: int, meet: Any) -> None:
        self._model, self._optimizer, self._steps, self._meet = model, optimizer, steps, meet
        self.times: list[tuple[float, float]] = []

    def run(self, batches: Any) -> None:
        """Trains; both kinds of steps have two that are not counted at their beginning."""
        for at, (x, y) in enumerate(batches):
            if at >= self._steps + 2:
                self._meet(at)
            begun_s = time.perf_counter()  # of one clock in all processes
            self._optimizer.zero_grad()
            F.cross_entropy(self._model(x), y).backward()
            self.times.append((begun_s, time.perf_counter()))
            self._optimizer.step()

    @property
    def num_batches(self) -> int:
        """How many it needs."""
        return 2 * (self._steps + 2)


def meet(path: Path, worker: int, workers: int, at: int, *, between_looks_s: float | None = None) -> None:
    """Waits, busily or sleeping between looks, until all workers are at a step: a file that all map has their counts."""
    counts = torch.from_file(str(path), shared=True, size=workers, dtype=torch.int64)
    counts[worker] = at
    while int(counts.min()) < at:
        if between_looks_s is not None:
            time.sleep(between_looks_s)


def train(sizes: Sizes, kind: str, plan: pl.Plan, steps: int, folder: str) -> None:
    """One worker of a placed run."""
    part = plan.part(sizes.model(kind))
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    loop = Loop(part, optimizer, steps, partial(meet, Path(folder) / "counts", part.worker, plan.workers))
    with pl.attach(part, optimizer) as worker:
        loop.run(worker.batches(sizes.loader(loop.num_batches)))
    (Path(folder) / f"{part.worker}.json").write_text(json.dumps(loop.times))


def took(times: list[list[tuple[float, float]]]) -> tuple[float, float]:
    """Median seconds from a step to the next, of the worker that takes longest; and of one step after a barrier, of all."""
    half = len(times[0]) // 2
    periods = [[b[0] - a[0] for a, b in itertools.pairwise(own[2:half])] for own in times]
    alone = [max(end for _, end in step) - min(begin for begin, _ in step) for step in zip(*times, strict=True)]
    return max(map(statistics.median, periods)), statistics.median(alone[half + 2 :])


def placed_s(sizes: Sizes, kind: str, plan: pl.Plan, steps: int, slow: dict[int, float]) -> tuple[float, float]:
    """As `took`, of a placed run."""
    with tempfile.TemporaryDirectory() as folder:
        torch.from_file(str(Path(folder) / "counts"), shared=True, size=plan.workers, dtype=torch.int64).zero_()
        loop = partial(train, sizes, kind, plan, steps, folder)
        pl.launch(loop, workers=plan.workers, plan=plan, slow=slow, intra_op_threads=1)
        return took([json.loads((Path(folder) / f"{w}.json").read_text()) for w in range(plan.workers)])


def plain(sizes: Sizes, kind: str, steps: int, results: Any, barrier: Any) -> None:
    """A process without Paceline."""
    torch.set_num_threads(1)
    model = sizes.model(kind)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.01), steps, lambda at: None)
    barrier.wait()
    loop.run(sizes.loader(loop.num_batches))
    results.put(loop.times)


def plain_s(sizes: Sizes, kind: str, steps: int, processes: int = 1) -> float:
    """Seconds from a step to the next in as many independent processes; of the one that takes longest."""
    context = multiprocessing.get_context("spawn")
    results, barrier = context.Queue(), context.Barrier(processes)
    started = [context.Process(target=plain, args=(sizes, kind, steps, results, barrier)) for _ in range(processes)]
    for one in started:
        one.start()
    found = [results.get() for _ in started]
    for one in started:
        one.join()
    return took(found)[0]


def every_placement(plan: pl.Plan) -> list[pl.Plan]:
    """The plan with each of its parts on each of two workers, in the order of binary numbers."""
    problem = plan.problem
    firsts = sorted(problem.members)
    found = []
    for devices in itertools.product((0, 1), repeat=len(firsts)):
        at = dict(zip(firsts, devices, strict=True))
        found.append(
            plan.again(
                device_of={one.name: at[first] for one, first in zip(problem.groups, problem.class_of, strict=True)}
            )
        )
    return found


def ratio(values: list[float]) -> str:
    """Median and range."""
    return f"**{statistics.median(values):.2f}** ({min(values):.2f} to {max(values):.2f})"


def say(text: str) -> None:
    """Progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def towers_and_chain(sizes: Sizes, rounds: int, steps: int, loads: list[float]) -> list[str]:
    """The table of ratios to one process: towers with small and large batches, and a chain."""
    large = replace(sizes, batch=LARGE * sizes.batch)
    cases = [("towers", sizes), ("towers", large), ("chain", sizes)]
    plans = [pl.place(of.model(kind), of.images(of.batch), devices=2, force=True) for kind, of in cases]
    gains: list[list[float]] = [[] for _ in cases]
    limits: list[list[float]] = [[] for _ in cases]
    for at in range(rounds):
        for (kind, of), plan, gain, limit in zip(cases, plans, gains, limits, strict=True):
            gain.append(plain_s(of, kind, steps) / placed_s(of, kind, plan, steps, {})[0])
            if kind == "towers":
                limit.append(2 * plain_s(of, "one tower", steps) / plain_s(of, "one tower", steps, processes=2))
            loads.append(os.getloadavg()[0])
            say(
                f"round {at}: {kind} of {of.batch} images {gain[-1]:.2f}"
                + "".join(f", limit {one:.2f}" for one in limit[-1:])
            )
    rows = []
    for (kind, of), plan, gain, limit in zip(cases, plans, gains, limits, strict=True):
        what = "two equal towers" if kind == "towers" else "a chain"
        planned = plan.one_device_s / plan.makespan_s
        target = "1.6" if kind == "towers" else "1.0"
        rows.append(
            f"| {what}, {of.batch} images | {planned:.2f} | {ratio(gain)} | {target} | {ratio(limit) if limit else ''} |"
        )
    verdict = next(line for line in plans[-1].explain().splitlines()[1:] if line)
    return [
        "Times one process, the whole step with its optimizer; the limit is two independent processes with a tower each.",
        "",
        "| on two workers | planned | measured | target | the machine's limit |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"Of the chain the plan said before: {verdict}",
    ]


def one_slow(sizes: Sizes, rounds: int, steps: int, loads: list[float]) -> list[str]:
    """One of two workers three times slower: the plan against every placement, and simulated against measured."""
    plan = pl.place(sizes.model("unequal"), sizes.images(sizes.batch), devices=2, slow=SLOW, together=PARTS, force=True)
    every = every_placement(plan)
    firsts = sorted(plan.problem.members)
    fixed = {round(i * (len(every) - 1) / (FIXED - 1)) for i in range(FIXED)}  # whatever they take
    loop_s, alone_s = [], []
    for at, one in enumerate(every):
        period_s, step_s = placed_s(sizes, "unequal", one, steps, SLOW)
        loop_s.append(period_s)
        alone_s.append(step_s)
        say(f"placement {at} of {len(every)}: simulated {one.makespan_s * 1e3:.1f} ms, measured {step_s * 1e3:.1f} ms")
    chosen = [one.placement.device_of for one in every].index(plan.placement.device_of)
    best = sorted(range(len(every)), key=lambda at: alone_s[at])[:AGAIN]
    again: dict[int, list[tuple[float, float]]] = {at: [] for at in (chosen, *best)}
    for number in range(rounds):
        for at in again:
            again[at].append(placed_s(sizes, "unequal", every[at], steps, SLOW))
        loads.append(os.getloadavg()[0])
        say(f"again {number}: " + ", ".join(f"{at}: {took[-1][1] * 1e3:.1f} ms" for at, took in again.items()))
    medians = {at: tuple(statistics.median(column) for column in zip(*took, strict=True)) for at, took in again.items()}
    above = [medians[chosen][kind] / min(one[kind] for one in medians.values()) - 1 for kind in (0, 1)]
    off = [one.makespan_s / step_s - 1 for one, step_s in zip(every, alone_s, strict=True)]
    rows = []
    for at in sorted(range(len(every)), key=lambda one: every[one].makespan_s):
        where = "".join(str(every[at].placement.device_of[first]) for first in firsts)
        notes = [*["the plan"] * (at == chosen), *["fixed"] * (at in fixed)]
        rows.append(
            f"| {where} | {every[at].makespan_s * 1e3:.1f} ms | {alone_s[at] * 1e3:.1f} ms | {off[at]:+.0%}"
            f" | {loop_s[at] * 1e3:.1f} ms | {', '.join(notes)} |"
        )
    off_fixed = [abs(off[at]) for at in sorted(fixed)]
    return [
        f"All {len(every)} placements of {len(firsts)} parts ran once; then the {len(best)} fastest of them and the plan"
        f" {rounds} times in turns. The plan's step takes {above[1]:.0%} longer than the best of these medians, and in an"
        f" ordinary loop {above[0]:.0%} (target: 10 %).",
        "",
        f"Simulated against measured, of {len(fixed)} placements fixed beforehand: {statistics.median(off_fixed):.0%} off in"
        f" the median, {max(off_fixed):.0%} at most (target: 15 %); of all {len(every)}:"
        f" {statistics.median(map(abs, off)):.0%} and {max(map(abs, off)):.0%}. Measured block by block, the parts add up to"
        f" {plan.sum_s * 1e3:.1f} ms, and a step in one piece took {plan.step_s * 1e3:.1f} ms.",
        "",
        f"Digits: the worker of {', '.join(name for name, _ in PARTS)}; worker 1 is the slow one.",
        "",
        "| placement | simulated | measured | off | in an ordinary loop | |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def main() -> None:
    """Runs everything and writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="tiny images, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    sizes = Sizes(batch=4, side=8, width=4) if args.small else Sizes()
    began_s, loads = time.monotonic(), [os.getloadavg()[0]]
    first = towers_and_chain(sizes, args.rounds, args.steps, loads)
    second = one_slow(sizes, max(1, args.rounds // 2 + 1), args.steps, loads)
    lines = [
        "# Placed models on real processes",
        "",
        "Machine: " + ", ".join(f"{key} {value}" for key, value in {**machine(), **versions()}.items()) + ".",
        f"Command: `python benchmarks/placement.py --rounds {args.rounds} --steps {args.steps}"
        f"{' --small' if args.small else ''}`, {(time.monotonic() - began_s) / 60:.0f} minutes.",
        f"Load of the machine meanwhile, in processes that wished to run: {min(loads):.1f} to {max(loads):.1f}, on"
        f" {os.cpu_count()} cores. Images of {sizes.side} x {sizes.side}, {sizes.batch} in a step where nothing else is said,"
        f" and towers of {sizes.width} channels.",
        "",
        *first,
        "",
        "## One of two workers three times slower",
        "",
        *second,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
