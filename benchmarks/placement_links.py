"""Placed models on two machines: simulated against measured steps, and what placing gains, on slow and fast links.

    python benchmarks/placement_links.py [--rates 100 1000] [--rounds 3] [--steps 8] [--out FILE] [--small]

Each machine is a network namespace (`links/network.py`; needs root, `ip` and `tc`), and a link of the rate, in Mbit/s, joins
them. As a user would, it runs `paceline calibrate` in both, places models with its cluster file, and starts in each a script
that loads the plan. Each round runs all variants once, one after the other.

Every step begins after a barrier and is timed as in `placement.py`: from the first worker's beginning to the end of the last
worker's backward pass. A core can become slower by a third for some seconds, because other virtual machines use the processor.
So before and after each step, each worker that has a part times a step of the whole model, as the plan's measurement did; what
is compared with the measured step is the plan, simulated with cores as slow as that. A worker without a part sleeps meanwhile:
if it computed, it would slow the other core down, as it does not in the step.
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
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from links.network import WIRE, Network
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.model_parallel.graph.schedule import simulate
from paceline.run.fork_server import fork_server_context
from paceline.simulator import Cluster
from paceline.system.machine import machine, versions
from paceline.transport.keys import create_keys
from placement import FIXED, PARTS, Sizes, every_placement, meet, ratio, say

BENCHMARKS = Path(__file__).parent
RESULTS = BENCHMARKS / "results" / "placement_links.md"
EXAMPLE = BENCHMARKS.parent / "examples" / "placement.py"
PORT = 29513
BURST = "16kb"  # a larger one would carry a small tensor without the rate, as no real link does
WARM_UP = 2
_BETWEEN_LOOKS_S = 2e-4


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
    """A placement, and what its runs took: by round, a step's median seconds, and the simulation's at that moment."""

    case: Case
    name: str
    plan: pl.Plan
    steps_s: list[float] = field(default_factory=list)
    simulated_s: list[float] = field(default_factory=list)
    slowness: list[float] = field(default_factory=list)

    @property
    def busy(self) -> set[int]:
        """The workers that have a part."""
        return set(self.plan.placement.device_of)

    @property
    def off(self) -> float:
        """Simulated against measured, the median of the rounds."""
        return statistics.median(a / b for a, b in zip(self.simulated_s, self.steps_s, strict=True)) - 1

    @property
    def at_planned_speed_s(self) -> list[float]:
        """The measured steps, as if the cores were as fast as when the plan was measured."""
        pairs = zip(self.steps_s, self.simulated_s, strict=True)
        return [measured * self.plan.makespan_s / simulated for measured, simulated in pairs]

    def simulate(self, slowness: list[float]) -> float:
        """Seconds of a step on workers that are that much slower than when the plan was measured."""
        devices = tuple(replace(one, slowness=by) for one, by in zip(self.plan.problem.devices, slowness, strict=True))
        problem, placement = replace(self.plan.problem, devices=devices), self.plan.placement
        return simulate(problem, placement.device_of, placement.order).makespan_s


def whole_s(model: nn.Module, x: torch.Tensor) -> float:
    """Seconds of both passes of all of the model in this process, as a plan's measurement times them."""
    model.zero_grad()
    began_s = time.perf_counter()
    out = model(x)
    out.backward(torch.ones_like(out))
    return time.perf_counter() - began_s


def work(network: Network, folder: Path, host: int, case: Case, steps: int, *, is_busy: bool) -> None:
    """One worker of a placed run, in a process of its own."""
    network.enter(host)
    os.environ.update(environment(network, folder, host))
    torch.set_num_threads(1)
    part = pl.Plan.load(folder / "plan.json").part(case.model()[0])
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    (model, example), times, whole = case.model(), [], []
    with pl.attach(part, optimizer) as worker:
        for at, (x, y) in enumerate(worker.batches(case.sizes.loader(WARM_UP + steps + 1))):
            if is_busy:
                whole.append(whole_s(model, example))
            meet(folder / "counts", part.worker, 2, at, between_looks_s=None if is_busy else _BETWEEN_LOOKS_S)
            begun_s = time.perf_counter()  # of one clock in all processes
            optimizer.zero_grad()
            F.cross_entropy(part(x), y).backward()
            times.append((begun_s, time.perf_counter()))
            optimizer.step()
    (folder / f"{part.worker}.json").write_text(json.dumps({"times": times, "whole": whole}))


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
    torch.from_file(str(folder / "counts"), shared=True, size=2, dtype=torch.int64).zero_()
    context = fork_server_context()
    running = [
        context.Process(
            target=work, args=(network, folder, host, variant.case, steps), kwargs={"is_busy": host in variant.busy}
        )
        for host in range(variant.plan.workers)
    ]
    for one in running:
        one.start()
    for one in running:
        one.join()
    if any(one.exitcode for one in running):
        raise SystemExit(f"A worker of {variant.case.name}, {variant.name}, failed.")
    found = [json.loads((folder / f"{host}.json").read_text()) for host in range(2)]
    steps_s, simulated_s, slowness = [], [], []
    for at in range(WARM_UP, WARM_UP + steps):
        began_s, ended_s = zip(*(one["times"][at] for one in found), strict=True)
        steps_s.append(max(ended_s) - min(began_s))
        by_worker = {
            host: statistics.mean(found[host]["whole"][at : at + 2]) / variant.plan.step_s for host in variant.busy
        }
        simulated_s.append(variant.simulate([by_worker.get(host, 1.0) for host in range(2)]))
        slowness += by_worker.values()
    variant.steps_s.append(statistics.median(steps_s))
    variant.simulated_s.append(statistics.median(simulated_s))
    variant.slowness += slowness


def placed(case: Case, cluster: Cluster) -> pl.Plan:
    """The case's plan for the measured links."""
    together = PARTS if case.kind == "unequal" else []
    return pl.place(*case.model(), devices=2, cluster=cluster, together=together, force=True)


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
        made = [one for case in cases for one in variants(case, placed(case, cluster))]
        for number in range(rounds):
            for one in made:
                measure(network, folder, one, steps)
                say(
                    f"{rate_mbit:g} Mbit/s, round {number}: {one.case.name}, {one.name}: simulated"
                    f" {one.simulated_s[-1] * 1e3:.1f} ms, measured {one.steps_s[-1] * 1e3:.1f} ms"
                )
    off = [abs(one.off) for one in made]
    gains = []
    for case in cases:
        own = {one.name: one for one in made if one.case is case}
        if "the plan" in own:
            plan, alone = own["the plan"], own["all on one"]
            ratios = [b / a for a, b in zip(plan.at_planned_speed_s, alone.at_planned_speed_s, strict=True)]
            predicted = alone.plan.makespan_s / plan.plan.makespan_s
            gains.append(
                f"| {case.name} | {predicted:.2f} | {ratio(ratios)} | {predicted / statistics.median(ratios) - 1:+.0%} |"
            )
    rows = [
        f"| {one.case.name} | {one.name} | {one.plan.makespan_s * 1e3:.1f} ms"
        f" | {statistics.median(one.simulated_s) * 1e3:.1f} ms | {statistics.median(one.steps_s) * 1e3:.1f} ms"
        f" | {one.off:+.0%} | {min(one.slowness):.2f} to {max(one.slowness):.2f} |"
        for one in made
    ]
    return [
        f"## A link of {rate_mbit:g} Mbit/s",
        "",
        f"`paceline calibrate` measured {cluster.latency_s * 1e6:.0f} us and {cluster.bandwidth_bytes_per_s / 1e6:.1f} MB/s.",
        "",
        "| faster than all on one | predicted | measured | off (target: 15 %) |",
        "|---|---|---|---|",
        *gains,
        "",
        f"Simulated against measured: {statistics.median(off):.0%} off in the median (target: 8 %), {max(off):.0%} at most"
        " (target: 15 %).",
        "",
        "| model | placement | the plan's step | at the cores' speed | measured | off | slower than when planned |",
        "|---|---|---|---|---|---|---|",
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
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = Sizes(batch=4, side=8, width=6) if args.small else Sizes()
    cases = [
        Case("the example's two towers", "example", Sizes(batch=32)),
        Case("two equal towers", "towers", sizes),
        Case("three unequal towers", "unequal", sizes),
    ]
    torch.set_num_threads(1)
    began_s, loads = time.monotonic(), [os.getloadavg()[0]]
    parts = []
    for rate in args.rates:
        parts += one_rate(rate, cases, args.rounds, args.steps)
        loads.append(os.getloadavg()[0])
    lines = [
        "# Placed models on two machines",
        "",
        "Machine: " + ", ".join(f"{key} {value}" for key, value in {**machine(), **versions()}.items()) + ".",
        f"Command: `python benchmarks/placement_links.py --rounds {args.rounds} --steps {args.steps}"
        f"{' --small' * args.small}`, {(time.monotonic() - began_s) / 60:.0f} minutes."
        f" Load average before, and after each link's runs: {', '.join(f'{one:.1f}' for one in loads)},"
        f" on {os.cpu_count()} cores.",
        "",
        "Two network namespaces, joined by a link whose rate `tc` limits. Medians of the rounds; digits say which worker runs"
        f" {', '.join(name for name, _ in PARTS)}, as far as they are apart.",
        "",
        *parts,
    ]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    (args.out or RESULTS).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
