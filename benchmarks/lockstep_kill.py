"""`kill -9` of a worker under lockstep methods: how long until all others have made their next step.

    python benchmarks/lockstep_kill.py [--trials 40] [--workers 4] [--methods all-reduce,lockstep] [--replaced 10]

Prints tables and writes benchmarks/results/lockstep_kill.md. Each trial is a run of its own, in which one worker kills itself
before a step drawn at random. The time counts from that moment to the end of the next step of the last survivor. The control
is the same time without a death: the longest of a trial's steps before it, and their median.

Workers are those of `pl.launch`, and processes that join a run (`paceline launch -- SCRIPT.py`), which watch each other. The
steps of the latter are compared with those of the same processes under torchrun's variables, whose all-reduce is Gloo's.

In the second table, the worker is replaced: how long until the replacement's first step has ended, and how long the others
wait for it, as their longest step from a second before that to its end. The control are their steps before the death.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import statistics
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import paceline as pl
from paceline.membership.join_point import JoinPoint
from paceline.system.machine import machine, versions

RESULTS = Path(__file__).parent / "results"
STEPS, WARM_UP = 120, 20
_KINDS = {False: "of `pl.launch`", True: "that join a run"}
# With replacements: a layer's width, and rounds, which last until the replacement has come.
SIZES = {"0.5 MB": (256, 2500), "16 MB": (1448, 150), "80 MB": (3238, 40)}


@dataclass(frozen=True)
class Loop:
    """Trains 131,000 parameters (0.5 MB) or more; each worker writes down when its steps ended."""

    folder: Path
    method: str
    victim: int
    at: int
    width: int = 256
    num_batches: int = STEPS * 4
    is_replaced: bool = False
    signal: int = signal.SIGKILL

    def __call__(self) -> None:
        """Runs in a worker."""
        torch.manual_seed(0)
        torch.set_num_threads(1)
        net = nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU(), nn.Linear(self.width, self.width - 1))
        kind = torch.optim.Adam if self.is_replaced else torch.optim.SGD
        optimizer = kind(net.parameters(), lr=0.001)
        batches = [torch.randn(16, self.width)] * self.num_batches
        with pl.attach(net, optimizer, algorithm=self.method) as worker:
            path = self.folder / str(worker.worker_id)
            is_replacement = path.exists()
            times = (self.folder / f"{worker.worker_id}{'-1' * is_replacement}").open("wb", buffering=0)
            for step, x in enumerate(worker.batches(batches)):
                optimizer.zero_grad()
                loss = net(x).square().mean()
                if (worker.worker_id, step, is_replacement) == (self.victim, self.at, False):
                    times.write(struct.pack("d", time.monotonic()))
                    os.kill(os.getpid(), self.signal)
                loss.backward()
                optimizer.step()
                times.write(struct.pack("d", time.monotonic()))


def free_port() -> int:
    """A port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(loop: Loop, workers: int, *, joined: bool) -> None:
    """The loop in processes that join a run, or that find each other by torchrun's variables."""
    address = f"127.0.0.1:{free_port()}"
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(workers)}
    if joined:
        environment = {"PACELINE_JOIN": address, "PACELINE_OF": str(workers)}
    context = multiprocessing.get_context("forkserver")
    ranks = [*range(workers), *[workers] * loop.is_replaced]  # a replacement looks for its place by itself
    processes = [
        context.Process(target=_with_environment, args=(loop, {**environment, "RANK": str(one)})) for one in ranks
    ]
    with contextlib.closing(JoinPoint(address, None, 60)) if joined else contextlib.nullcontext():
        for one in processes[:workers]:
            one.start()
        for one in processes[workers:]:
            multiprocessing.connection.wait([first.sentinel for first in processes[:workers]])
            one.start()
        if loop.signal == signal.SIGSTOP:
            while sum(one.exitcode == 0 for one in processes) < workers - 1:
                multiprocessing.connection.wait([one.sentinel for one in processes if one.exitcode is None])
            processes[[one.exitcode for one in processes].index(None)].kill()
        for one in processes:
            one.join()
    if [one.exitcode for one in processes].count(0) < len(processes) - (loop.victim >= 0):
        raise SystemExit(f"A run of {loop.method} failed.")


def _with_environment(loop: Loop, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    loop()


def times_of(folder: str, workers: int) -> dict[int, list[float]]:
    """When each worker's steps ended."""
    return {
        one: [t for (t,) in struct.iter_unpack("d", (Path(folder) / str(one)).read_bytes())] for one in range(workers)
    }


def steps_ms(method: str, workers: int, width: int, *, joined: bool) -> float:
    """The median step of a run without a death."""
    with tempfile.TemporaryDirectory() as folder:
        run_processes(Loop(Path(folder), method, -1, -1, width), workers, joined=joined)
        own = times_of(folder, workers)[0][WARM_UP:]
    return statistics.median(b - a for a, b in itertools.pairwise(own)) * 1e3


def trial(
    method: str, workers: int, draws: random.Random, *, joined: bool, number: int = signal.SIGKILL
) -> dict[str, float]:
    """One run with a death, or a worker that is stopped for ever, in seconds."""
    victim, at = draws.randrange(workers), draws.randrange(WARM_UP + 10, STEPS - 10)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(Path(folder), method, victim, at, signal=number)
        if joined:
            run_processes(loop, workers, joined=True)
        else:
            result = pl.launch(loop, workers=workers).result
            if result["outcome"] != "stopped" or result["workers_lost"] != [victim]:
                raise SystemExit(f"A run of {method} ended as {result['outcome']}: {result['outcome_reason']}")
        ended = times_of(folder, workers)
    killed_s = ended.pop(victim)[at]
    steps_s = [
        b - a for own in ended.values() for a, b in zip(own[WARM_UP : at - 1], own[WARM_UP + 1 : at], strict=True)
    ]
    return {
        "recovery": max(own[at] for own in ended.values()) - killed_s,
        "longest": max(steps_s),
        "median": statistics.median(steps_s),
    }


def replaced(method: str, workers: int, size: str, draws: random.Random, *, joined: bool) -> dict[str, float]:
    """One run with a death and a replacement, in seconds."""
    victim, at, (width, rounds) = draws.randrange(workers), 10, SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(Path(folder), method, victim, at, width, rounds * workers, is_replaced=True)
        if joined:
            run_processes(loop, workers, joined=True)
        else:
            result = pl.launch(loop, workers=workers, restarts=1).result
            if result["outcome"] != "stopped" or result["restarts"] != 1:
                raise SystemExit(f"A run of {method} ended as {result['outcome']}: {result['outcome_reason']}")
        ended = {
            path.name: [t for (t,) in struct.iter_unpack("d", path.read_bytes())] for path in Path(folder).iterdir()
        }
    killed_s, first_s = ended.pop(str(victim))[at], ended.pop(f"{victim}-1")[0]
    steps = [(a, b) for own in ended.values() for a, b in itertools.pairwise(own[5:])]
    return {
        "replaced": first_s - killed_s,
        "waited": max(b - a for a, b in steps if b > first_s - 1.0 and a < first_s),
        "longest": max(b - a for a, b in steps if b < killed_s),
    }


def row_of_replaced(method: str, workers: int, size: str, trials: int, seed: int, *, joined: bool) -> str:
    """A row of the second table."""
    draws = random.Random(f"{method} {size} {seed}")
    found = [replaced(method, workers, size, draws, joined=joined) for _ in range(trials)]
    cells = []
    for name in ("replaced", "waited"):
        values = sorted(one[name] for one in found)
        cells.append(f"{statistics.median(values):.2f} | {values[-1]:.2f}")
    control = statistics.median(one["longest"] for one in found)
    return f"| {_KINDS[joined]} | `{method}` | {size} | {' | '.join(cells)} | {control:.2f} |"


def row(method: str, workers: int, trials: int, seed: int, *, joined: bool) -> str:
    """One method's row of the table."""
    draws = random.Random(f"{method} {seed}")
    found = [trial(method, workers, draws, joined=joined) for _ in range(trials)]
    recovery = sorted(one["recovery"] * 1e3 for one in found)
    percentile = recovery[min(len(recovery) - 1, int(0.95 * len(recovery)))]
    step, longest = statistics.median(one["median"] for one in found) * 1e3, max(one["longest"] for one in found) * 1e3
    deaths = f"{statistics.median(recovery):.0f} | {percentile:.0f} | {recovery[-1]:.0f}"
    return f"| {_KINDS[joined]} | `{method}` | {deaths} | {step:.1f} | {longest:.0f} |"


def row_of_stopped(method: str, workers: int, trials: int, seed: int) -> str:
    """A row of the table of workers that stand still; `PACELINE_DEADLINE_S` is set."""
    draws = random.Random(f"{method} {seed}")
    found = [trial(method, workers, draws, joined=True, number=signal.SIGSTOP)["recovery"] for _ in range(trials)]
    return f"| `{method}` | {statistics.median(found):.2f} | {min(found):.2f} | {max(found):.2f} |"


def row_of_steps(workers: int, width: int, pairs: int) -> str:
    """A row of the table of steps without deaths: runs in turn, medians over them."""
    found = [[steps_ms("all-reduce", workers, width, joined=joined) for joined in (True, False)] for _ in range(pairs)]
    messages, gloo = (statistics.median(one) for one in zip(*found, strict=True))
    ratio = statistics.median(one / other for one, other in found)
    return f"| {workers} | {width * (width + 1) * 8 / 1e6:.1f} MB | {messages:.2f} | {gloo:.2f} | {ratio:.2f} |"


def main() -> None:
    """Runs all trials and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--methods", default="all-reduce,lockstep")
    parser.add_argument("--replaced", type=int, default=10, help="trials with a replacement, for each size")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of runs without deaths")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    methods = options.methods.split(",")
    rows = [
        row(method, options.workers, options.trials, options.seed, joined=joined)
        for joined in (False, True)
        for method in methods
    ]
    steps = [row_of_steps(workers, width, options.pairs) for workers in (2, 4) for width in (256, 1448)]
    replacements = [
        row_of_replaced(method, options.workers, size, options.replaced, options.seed, joined=joined)
        for joined in (False, True)
        for method in methods
        for size in SIZES
    ]
    about, used = machine(), versions()
    page = [
        "# A worker is killed under a lockstep method",
        "",
        f"Machine: {about['processor']}, {about['cores']} cores, load {load:.1f} at the start. "
        f"Python {used['python']}, PyTorch {used['torch']}.",
        f"Command: `python benchmarks/lockstep_kill.py --trials {options.trials} --workers {options.workers}`.",
        "",
        f"{options.workers} workers, 0.5 MB of parameters, {options.trials} deaths at random steps. Times in ms, from the"
        " `SIGKILL` to the end of the last survivor's next step. The control are steps without a death in the same runs.",
        "",
        "| workers | method | median | 95 % | longest | control: median step | control: longest step |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"Steps of `all-reduce` without deaths, in ms: {options.pairs} pairs of runs in turn, medians.",
        "",
        "| workers | parameters | that join a run: messages | under torchrun: Gloo | ratio |",
        "|---|---|---|---|---|",
        *steps,
        "",
        f"With replacements, {options.replaced} deaths for each size of the parameters, trained with Adam. Times in s. The"
        " control is the others' longest step before the death, median over the trials.",
        "",
        "| workers | method | parameters | until the replacement's first step: median | longest | others' longest step:"
        " median | longest | control |",
        "|---|---|---|---|---|---|---|---|",
        *replacements,
    ]
    print("\n".join(page))
    (RESULTS / "lockstep_kill.md").write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
