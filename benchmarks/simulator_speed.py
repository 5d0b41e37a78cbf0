"""The simulator: timing-only AD-PSGD of thousands of workers, and real gradients against a plain loop, in one run.

    python benchmarks/simulator_speed.py [--data FOLDER] [--rounds 10] [--repeats 5] [--runs FILE]

Appends to benchmarks/results/simulator.jsonl, of which `python benchmarks/pages.py simulator` makes the page. Timing only: the
CPU time of one `simulate_task` with declared parameters, and of one `paceline simulate` with all its files, against a loop
that only handles events. Real gradients: 128 workers on `mnist-mlp` with batches of 512, `--rounds` steps each,
against a plain loop that computes and applies as many gradients on as many replicas, with an optimizer each. The simulation
evaluates as usual, which the loop does not: 17 models at the end and the mean once per epoch, so few rounds make its ratio
look worse.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measurements import OURS, Measurements, in_turn, made, rows, table, wrapped
from torch import nn

import paceline as pl
from paceline.tasks.load import load_task

RESULTS = Path(__file__).parent / "results"
NUM_PARAMETERS = 134_794  # of mnist-mlp
WORKERS, BATCH_SIZE = 128, 512
EVENTS_PER_STEP = 7  # of the plain loop; the simulator has 9 or 10
TIMING, GRADIENTS = "timing only", "real gradients"


def timing_only_s(workers: int, steps: int) -> float:
    """CPU seconds of one simulation without files."""
    config = pl.TrainConfig(task="mnist-mlp", algorithm="ad-psgd", workers=workers, steps=steps)
    begun_s = time.process_time()
    pl.simulate_task(config, timing_only=True, num_parameters=NUM_PARAMETERS)
    return time.process_time() - begun_s


def command_line_s(data: Path | None, workers: int, steps: int) -> float:
    """User seconds of one `paceline simulate`, its start and files included."""
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "paceline", "simulate", "--timing-only", "--json"]
    command += ["--task", "mnist-mlp", "--algorithm", "ad-psgd", "--workers", str(workers), "--steps", str(steps)]
    command += ["--data", str(data)] if data is not None else ["--parameters", str(NUM_PARAMETERS)]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, "--out", folder], check=True, capture_output=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s


def simulated_s(data: Path | None, rounds: int) -> float:
    """CPU seconds of a simulation with real gradients."""
    config = pl.TrainConfig(
        task="mnist-mlp", algorithm="ad-psgd", workers=WORKERS, steps=rounds, batch_size=BATCH_SIZE, data=data
    )
    begun_s = time.process_time()
    run = pl.simulate_task(config)
    assert run.result["computed_gradients"] == WORKERS * rounds
    return time.process_time() - begun_s


def plain_s(data: Path | None, rounds: int) -> float:
    """CPU seconds of as many gradients and steps in a loop over as many replicas, the data's loading included."""
    begun_s = time.process_time()
    task = load_task("mnist-mlp")
    train_set, _ = task.load(data)
    torch.manual_seed(0)
    replicas: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for _ in range(WORKERS):
        model = task.model()
        replicas.append((model, torch.optim.SGD(model.parameters(), lr=0.05)))
    order, at = torch.randperm(len(train_set)), 0  # type: ignore[arg-type]
    for _ in range(rounds):
        for model, optimizer in replicas:
            if at + BATCH_SIZE > len(order):
                at = 0
            x, y = train_set[order[at : at + BATCH_SIZE]]
            at += BATCH_SIZE
            optimizer.zero_grad()
            task.loss(model(x), y).backward()
            optimizer.step()
    return time.process_time() - begun_s


def plain_events_s(workers: int, steps: int) -> float:
    """CPU seconds of a loop that does nothing but take the next event of a heap and resume its worker, a generator.

    No program in plain Python handles so many events sooner.
    """
    begun_s = time.process_time()
    gc.disable()
    draw = random.Random(0).random

    def worker() -> Iterator[float]:
        for _ in range(steps * EVENTS_PER_STEP):
            yield draw()

    programs = [worker() for _ in range(workers)]
    queue = [(0.0, number) for number in range(workers)]
    while queue:
        now_s, number = heapq.heappop(queue)
        for wait_s in programs[number]:
            heapq.heappush(queue, (now_s + wait_s, number))
            break
    gc.enable()
    return time.process_time() - begun_s


def main() -> None:
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("PACELINE_DATA"), help="folder of MNIST's files")
    parser.add_argument("--rounds", type=int, default=10, help="steps of every worker with real gradients (default 10)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements per row (default 5)")
    parser.add_argument("--runs", type=Path, default=RESULTS / "simulator.jsonl", help="where measurements are kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    timing_only_s(4, 2)  # imports
    measurements = Measurements(arguments.runs, arguments.repeats)
    for workers, steps, target in ((1_000, 100, "4"), (10_000, 20, "")):
        measurements.measure(
            f"timing only, {workers:,} workers x {steps} steps, CPU time",
            in_turn(ours=partial(timing_only_s, workers, steps), peer=partial(plain_events_s, workers, steps)),
            section=TIMING, unit="s", target=target,
        )  # fmt: skip
    measurements.measure(
        "`paceline simulate --task mnist-mlp`, timing only, 10,000 workers x 20 steps, all files, user time",
        in_turn(ours=partial(command_line_s, arguments.data, 10_000, 20), peer=partial(plain_events_s, 10_000, 20)),
        section=TIMING, unit="s", target="10",
    )  # fmt: skip
    measurements.measure(
        f"real gradients, {WORKERS} workers x {arguments.rounds} steps of {BATCH_SIZE} samples, CPU time",
        in_turn(
            ours=partial(simulated_s, arguments.data, arguments.rounds),
            peer=partial(plain_s, arguments.data, arguments.rounds),
        ),
        section=GRADIENTS, unit="s", target="1.3",
    )  # fmt: skip


def markdown(records: list[dict[str, Any]]) -> str:
    """The page."""
    timing, gradients = ([row for row in rows(records) if row.section == name] for name in (TIMING, GRADIENTS))
    asked = [row for row in timing if row.target]
    missed = [
        f"{row.what} ({median(row.values(OURS)):.1f} s, {row.target} asked)"
        for row in asked
        if median(row.values(OURS)) > float(row.target)
    ]
    missed += [
        f"{row.what} ({row.ratio:.2f} times a plain loop's, {row.target} asked)"
        for row in gradients
        if row.ratio > float(row.target)
    ]
    limits = ", ".join(f"{row.ratio:.0f}" for row in timing)
    return "\n".join([
        "# Simulator: AD-PSGD on a ring, the default cluster",
        "",
        wrapped(
            f"Without gradients the simulator takes {limits} times the CPU time of a loop in plain Python, which does nothing"
            f" but take {EVENTS_PER_STEP} events per step from a heap and resume their workers; the simulator handles 9 or 10."
            f" The last figure includes the command's start and all files. With real gradients the simulator takes"
            f" {gradients[0].ratio:.2f} times as long as a plain loop. Slower than asked: {'; '.join(missed) or 'none'}."
        ),
        "",
        made(records, "python benchmarks/simulator_speed.py", "simulator"),
        "",
        *table(timing, "simulator", "plain events", 1),
        "",
        "With real gradients the target is of the ratio, and the peer is a loop over as many replicas and optimizers:",
        "",
        *table(gradients, "simulator", "plain loop", 1),
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
