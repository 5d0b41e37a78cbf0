"""The simulator: timing-only AD-PSGD of thousands of workers, and real gradients against a plain loop, in one run.

    python benchmarks/simulator.py [--data FOLDER] [--rounds 10] [--pairs 3] [--out FILE]

Prints a table and writes benchmarks/results/simulator.md. Timing only: the CPU time of one `simulate_task` with declared
parameters, and of one `paceline simulate` with all its files. Real gradients: 128 workers on `mnist-mlp` with batches of 512,
`--rounds` steps each, against a plain loop that computes and applies as many gradients on as many replicas, with
an optimizer each; in pairs, and who goes first alternates. The simulation evaluates as usual, which the loop does not: 17
models at the end and the mean once per epoch, so few rounds make its ratio look worse.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import paceline as pl
from paceline.system.machine import machine, versions
from paceline.tasks.load import load_task

RESULTS = Path(__file__).parent / "results"
NUM_PARAMETERS = 134_794  # of mnist-mlp
WORKERS, BATCH_SIZE = 128, 512


def timing_only_s(workers: int, steps: int) -> float:
    """CPU seconds of one simulation without files."""
    config = pl.TrainConfig(task="mnist-mlp", algorithm="ad-psgd", workers=workers, steps=steps)
    begun_s = time.process_time()
    pl.simulate_task(config, timing_only=True, num_parameters=NUM_PARAMETERS)
    return time.process_time() - begun_s


def command_line(data: Path | None, workers: int, steps: int) -> tuple[float, float]:
    """User seconds of one `paceline simulate`, its start and files included, and the most memory that it had, in MB."""
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-c",
            "from paceline.cli.app import main; main()",
            "simulate",
            "--timing-only",
            "--json",
        ]
        command += ["--task", "mnist-mlp", "--algorithm", "ad-psgd", "--workers", str(workers), "--steps", str(steps)]
        command += ["--data", str(data)] if data is not None else ["--parameters", str(NUM_PARAMETERS)]
        subprocess.run([*command, "--out", folder], check=True, capture_output=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime - before_s, used.ru_maxrss / 1024


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


def ratio_row(data: Path | None, rounds: int, num_pairs: int) -> str:
    """The line about real gradients."""
    pairs = []
    for index in range(num_pairs + 1):
        if index % 2:
            plain = plain_s(data, rounds)
            pairs.append((simulated_s(data, rounds), plain))
        else:
            pairs.append((simulated_s(data, rounds), plain_s(data, rounds)))
    ratios = [simulated / plain for simulated, plain in pairs[1:]]  # the first pair warms up
    return (
        f"| real gradients, {WORKERS} workers x {rounds} steps of {BATCH_SIZE} samples, times a plain loop's CPU time |"
        f" **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}, {num_pairs} pairs) | 1.3 |"
    )


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("PACELINE_DATA"), help="folder of MNIST's files")
    parser.add_argument("--rounds", type=int, default=10, help="steps of every worker with real gradients (default 10)")
    parser.add_argument("--pairs", type=int, default=3, help="interleaved pairs for their ratio (default 3)")
    parser.add_argument("--out", type=Path, default=RESULTS / "simulator.md", help="where the table is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    timing_only_s(4, 2)  # imports
    rows = [f"| timing only, 1,000 workers x 100 steps, CPU time | {timing_only_s(1000, 100):.1f} s | 4 s |"]
    print(rows[-1], flush=True)
    rows.append(f"| timing only, 10,000 workers x 100 steps, CPU time | {timing_only_s(10_000, 100):.1f} s | 40 s |")
    print(rows[-1], flush=True)
    command_s, command_mb = command_line(arguments.data, 10_000, 20)
    rows.append(
        "| `paceline simulate --task mnist-mlp`, timing only, 10,000 workers x 20 steps, all files, user time |"
        f" {command_s:.1f} s, {command_mb:,.0f} MB at most | 15 s |"
    )
    print(rows[-1], flush=True)
    rows.append(ratio_row(arguments.data, arguments.rounds, arguments.pairs))
    print(rows[-1], flush=True)
    about, package = machine(), versions()
    head = [
        "# Simulator: AD-PSGD on a ring, the default cluster",
        "",
        "CPU times of one machine, beside their targets. What a plain Python loop takes there, which is the machine's limit,"
        " is not measured beside them. The raw runs are not in the repository.",
        "",
        f"Machine: {about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}."
        f" Python {package['python']}, PyTorch {package['torch']}. Load average at the end: {os.getloadavg()[0]:.1f}.",
        f"Command: `python benchmarks/simulator.py --rounds {arguments.rounds} --pairs {arguments.pairs}`.",
        "Less is better. On a machine that others use, CPU times are long as well: caches and cores are shared.",
        "",
        "| what | measured | target |",
        "|---|---|---|",
    ]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("\n".join([*head, *rows, ""]))


if __name__ == "__main__":
    main()
