"""Placed models on two machines: simulated against measured steps, and what placing gains, on slow and fast links.

    python benchmarks/placement_links.py [--rates 100 1000] [--rounds 3] [--steps 8] [--out FILE] [--small] [--waiting]

Each machine is a network namespace (`links/network.py`; needs root, `ip` and `tc`), and a link of the rate, in Mbit/s, joins
them. As a user would, it runs `paceline calibrate` in both, places models with its cluster file, and starts in each a script
that loads the plan. Each round runs all variants once, one after the other.

Every step begins after a barrier and is timed as in `placement.py`: from the first worker's beginning to the end of the last
worker's backward pass. Other programs make steps longer, so a run makes steps in blocks until other programs used less than a
tenth of a core during one; of at most ten blocks, the least disturbed counts. Plans are measured again in the same way.

With --waiting, convolutions sleep for a fixed time instead of computing, so that a machine on which other programs have the
cores can still say how exactly links and the order of operations are simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from links.network import WIRE, Network
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.run.fork_server import fork_server_context
from paceline.simulator import Cluster
from paceline.system.machine import machine, versions
from paceline.transport.keys import create_keys
from placement import FIXED, PARTS, Sizes, every_placement, meet, ratio, say

BENCHMARKS = Path(__file__).parent
RESULTS = BENCHMARKS / "results" / "placement_links.md"
WAITING_RESULTS = RESULTS.with_stem("placement_links_waiting")
EXAMPLE = BENCHMARKS.parent / "examples" / "placement.py"
PORT = 29513
BURST = "16kb"  # a larger one would carry a small tensor without the rate, as no real link does
QUIET, MOST_BLOCKS, MOST_PLANS = 0.1, 10, 3  # cores that other programs use; blocks of steps, and plans, until then
WARM_UP = 2
WAIT_S = 0.02  # of a forward pass


class Sleep(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Waiting(nn.Module):
    """Waits as long as a convolution might compute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, WAIT_S)  # type: ignore[no-any-return]


class Widen(nn.Module):
    """Repeats an image's channels, times a parameter."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies, self.scale = copies, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x.repeat(1, self.copies, 1, 1)


class WaitingSizes(Sizes):
    """Its towers wait."""

    def tower(self, depth: int, first: int = 3, *, ends: bool = True) -> nn.Sequential:
        layers: list[nn.Module] = [Widen(self.width // first), *(Waiting() for _ in range(depth + 1))]
        return nn.Sequential(*layers, *([nn.AdaptiveAvgPool2d(4), nn.Flatten()] if ends else []))


@dataclass(frozen=True)
class Case:
    """A model and its batches; `kind` is one of `Sizes.model`, or "example", that of examples/placement.py."""

    name: str
    kind: str
    sizes: Sizes

    def model(self) -> tuple[nn.Module, torch.Tensor]:
        """It and an example batch, alike in all processes."""
        if self.kind == "example":
            return runpy.run_path(str(EXAMPLE))["model"]()
        return self.sizes.model(self.kind), self.sizes.images(self.sizes.batch)


@dataclass
class Variant:
    """A placement, and what its runs took: seconds of a step, and the cores that other programs used meanwhile."""

    case: Case
    name: str
    plan: pl.Plan
    steps_s: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def off(self) -> float:
        """Simulated against measured."""
        return self.plan.makespan_s / self.measured_s - 1


def computed_s() -> float:
    """Processor time of all programs of this machine, without interrupts, which are those of the network here."""
    user, nice, system, _, _, _, _, stolen, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")


class Blocks:
    """Blocks of steps until other programs hardly computed during one; the two workers agree over a file that both map.

    Args:
        folder: of the file.
        worker: 0 or 1.
        steps: of a block.
        most: blocks.
    """

    def __init__(self, folder: Path, worker: int, steps: int, most: int) -> None:
        self._folder, self._worker, self._steps, self._most = folder, worker, steps, most
        self._shared = torch.from_file(str(folder / "shared"), shared=True, size=3, dtype=torch.float64)
        self._began: tuple[float, float, float] | None = None
        self.others: list[float] = []

    def is_over(self, at: int) -> bool:
        """Whether enough steps were made before step `at`; waits for the other worker."""
        begins = at >= WARM_UP and (at - WARM_UP) % self._steps == 0
        if begins:
            self._shared[self._worker] = time.process_time()
        meet(self._folder / "counts", self._worker, 2, 2 * at)
        if begins and self._worker == 0:
            now = time.perf_counter(), computed_s(), float(self._shared[:2].sum())
            if self._began is not None:
                passed_s, all_s, own_s = (b - a for a, b in zip(self._began, now, strict=True))
                self.others.append(max(0.0, all_s - own_s) / passed_s)
                self._shared[2] = len(self.others) == self._most or self.others[-1] < QUIET
            self._began = now
        meet(self._folder / "counts", self._worker, 2, 2 * at + 1)
        return bool(self._shared[2])


def work(network: Network, folder: Path, host: int, case: Case, steps: int) -> None:
    """One worker of a placed run, in a process of its own."""
    network.enter(host)
    os.environ.update(environment(network, folder, host))
    torch.set_num_threads(1)
    part = pl.Plan.load(folder / "plan.json").part(case.model()[0])
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    most = 1 if isinstance(case.sizes, WaitingSizes) else MOST_BLOCKS
    blocks, times = Blocks(folder, part.worker, steps, most), []
    with pl.attach(part, optimizer) as worker:
        for at, (x, y) in enumerate(worker.batches(case.sizes.loader(WARM_UP + most * steps + 1))):
            if blocks.is_over(at):
                break
            begun_s = time.perf_counter()  # of one clock in all processes
            optimizer.zero_grad()
            F.cross_entropy(part(x), y).backward()
            times.append((begun_s, time.perf_counter()))
            optimizer.step()
    (folder / f"{part.worker}.json").write_text(json.dumps({"times": times, "others": blocks.others}))


def environment(network: Network, folder: Path, host: int) -> dict[str, str]:
    """Of a worker that torchrun would start there."""
    return {
        **{"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": network.address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": WIRE},
        **{"PACELINE_KEY": str(folder / "run.key"), "OMP_NUM_THREADS": "1", "PACELINE_DEADLINE_S": "120"},
    }


def calibrated(network: Network, folder: Path) -> Cluster:
    """The cluster that `paceline calibrate` finds on both hosts."""
    words = [sys.executable, "-m", "paceline", "calibrate", "--quick", "--out", str(folder / "cluster.toml")]
    running = [
        subprocess.Popen(network.command(host, words), env={**os.environ, **environment(network, folder, host)})
        for host in range(2)
    ]
    codes = [one.wait() for one in running]
    if any(codes):
        raise SystemExit("paceline calibrate failed.")
    return Cluster.load(folder / "cluster.toml")


def measure(network: Network, folder: Path, variant: Variant, steps: int) -> None:
    """Runs it once."""
    variant.plan.save(folder / "plan.json")
    for name, size, dtype in (("counts", 2, torch.int64), ("shared", 3, torch.float64)):
        torch.from_file(str(folder / name), shared=True, size=size, dtype=dtype).zero_()
    context, given = fork_server_context(), (variant.case, steps)
    running = [
        context.Process(
            target=work,
            args=(network, folder, host, *given),
        )
        for host in range(variant.plan.workers)
    ]
    for one in running:
        one.start()
    for one in running:
        one.join()
    if any(one.exitcode for one in running):
        raise SystemExit(f"A worker of {variant.case.name}, {variant.name}, failed.")
    told = [json.loads((folder / f"{host}.json").read_text()) for host in range(2)]
    others = told[0]["others"]
    first = WARM_UP + steps * others.index(min(others))
    pairs = list(zip(*(one["times"][first : first + steps] for one in told), strict=True))
    variant.steps_s.append(
        statistics.median(max(end for _, end in one) - min(begun for begun, _ in one) for one in pairs)
    )
    variant.others.append(min(others))


def placed(case: Case, cluster: Cluster) -> tuple[pl.Plan, float]:
    """The plan during whose measuring other programs computed least, and the cores that they used."""
    found = []
    for _ in range(MOST_PLANS):
        began = time.perf_counter(), computed_s(), time.process_time()
        plan = pl.place(
            *case.model(), devices=2, cluster=cluster, together=PARTS if case.kind == "unequal" else [], force=True
        )
        now = time.perf_counter(), computed_s(), time.process_time()
        passed_s, all_s, own_s = (b - a for a, b in zip(began, now, strict=True))
        found.append((plan, max(0.0, all_s - own_s) / passed_s))
        if found[-1][1] < QUIET or isinstance(case.sizes, WaitingSizes):
            break
    return min(found, key=lambda one: one[1])


def variants(case: Case, plan: pl.Plan) -> list[Variant]:
    """The plan and all on one; or, for unequal towers, placements that are fixed whatever they take."""
    if case.kind != "unequal":
        return [Variant(case, "the plan", plan), Variant(case, "all on one", plan.again(placer="all-on-one"))]
    every, firsts = every_placement(plan), sorted(plan.problem.members)
    fixed = sorted({round(i * (len(every) - 1) / (FIXED - 1)) for i in range(FIXED)})
    return [Variant(case, "".join(str(every[i].placement.device_of[one]) for one in firsts), every[i]) for i in fixed]


def one_rate(rate_mbit: float, cases: list[Case], rounds: int, steps: int) -> list[str]:
    """All that the page says about one link."""
    with tempfile.TemporaryDirectory(prefix="placed-") as name, Network(2, rate_mbit, BURST) as network:
        folder = Path(name)
        create_keys(folder / "run.key")
        cluster = calibrated(network, folder)
        plans = [placed(case, cluster) for case in cases]
        made = [one for case, (plan, _) in zip(cases, plans, strict=True) for one in variants(case, plan)]
        for number in range(rounds):
            for one in made:
                measure(network, folder, one, steps)
                say(
                    f"{rate_mbit:g} Mbit/s, round {number}: {one.case.name}, {one.name}: simulated"
                    f" {one.plan.makespan_s * 1e3:.1f} ms, measured {one.steps_s[-1] * 1e3:.1f} ms,"
                    f" others used {one.others[-1]:.2f} cores"
                )
    off = [abs(one.off) for one in made]
    plan_others = [others for _, others in plans]
    gains = []
    for case in cases:
        own = {one.name: one for one in made if one.case is case}
        if "the plan" in own:
            plan, alone = own["the plan"], own["all on one"]
            ratios = [b / a for a, b in zip(plan.steps_s, alone.steps_s, strict=True)]
            predicted = alone.plan.makespan_s / plan.plan.makespan_s
            gains.append(
                f"| {case.name} | {predicted:.2f} | {ratio(ratios)} | {predicted / statistics.median(ratios) - 1:+.0%} |"
            )
    rows = [
        f"| {one.case.name} | {one.name} | {one.plan.makespan_s * 1e3:.1f} ms | {one.measured_s * 1e3:.1f} ms"
        f" | {one.off:+.0%} | {min(one.others):.2f} to {max(one.others):.2f} |"
        for one in made
    ]
    return [
        f"## A link of {rate_mbit:g} Mbit/s",
        "",
        f"`paceline calibrate` measured {cluster.latency_s * 1e6:.0f} us and {cluster.bandwidth_bytes_per_s / 1e6:.1f} MB/s."
        f" Other programs used {min(plan_others):.2f} to {max(plan_others):.2f} cores while the plans' operations were timed.",
        "",
        "| faster than all on one | predicted | measured | off (target: 15 %) |",
        "|---|---|---|---|",
        *gains,
        "",
        f"Simulated against measured: {statistics.median(off):.0%} off in the median (target: 8 %), {max(off):.0%} at most"
        " (target: 15 %).",
        "",
        "| model | placement | simulated | measured | off | cores that others used |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def main() -> None:
    """Runs everything and writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 1000.0], help="of the link, in Mbit/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="tiny images, to see that it runs")
    parser.add_argument("--waiting", action="store_true", help="towers wait instead of computing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kind = WaitingSizes if args.waiting else Sizes
    sizes = kind(batch=4, side=8, width=6) if args.small else kind()
    cases = [
        *([] if args.waiting else [Case("the example's two towers", "example", Sizes(batch=32))]),
        Case("two equal towers", "towers", sizes),
        Case("three unequal towers", "unequal", sizes),
    ]
    began_s, loads = time.monotonic(), [os.getloadavg()[0]]
    parts = []
    for rate in args.rates:
        parts += one_rate(rate, cases, args.rounds, args.steps)
        loads.append(os.getloadavg()[0])
    options = " --small" * args.small + " --waiting" * args.waiting
    lines = [
        "# Placed models on two machines" + ", waiting instead of computing" * args.waiting,
        "",
        "Machine: " + ", ".join(f"{key} {value}" for key, value in {**machine(), **versions()}.items()) + ".",
        f"Command: `python benchmarks/placement_links.py --rounds {args.rounds} --steps {args.steps}{options}`,"
        f" {(time.monotonic() - began_s) / 60:.0f} minutes. Load average before, and after each link's runs:"
        f" {', '.join(f'{one:.1f}' for one in loads)}, on {os.cpu_count()} cores.",
        "",
        "Two network namespaces, joined by a link whose rate `tc` limits. Medians of the rounds; digits say which worker runs"
        f" {', '.join(name for name, _ in PARTS)}, as far as they are apart.",
        *([f"A layer of a tower sleeps for {WAIT_S * 1e3:g} ms, and twice as long backward."] * args.waiting),
        "",
        *parts,
    ]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    (args.out or (WAITING_RESULTS if args.waiting else RESULTS)).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
