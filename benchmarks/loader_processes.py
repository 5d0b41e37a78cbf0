"""What `launch` costs where a DataLoader's own processes make the batches: samples per second, as shares of the plain loop's.

    python benchmarks/loader_processes.py

Each sample sleeps for 2 ms, as decoding an image takes, so that training waits for the loader. All workers together have as
many loader processes as the plain loop: what it reaches, they should. The control has none: each of its workers fetches one
sample at a time. Plain and launched runs take turns; the figure is the median of a launched run's ratios to the mean of the
plain ones before and after it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from paceline.system.machine import machine, versions

HERE = Path(__file__).parent
SAMPLES, BATCH_SIZE, EPOCHS, LOADER_PROCESSES = 2048, 16, 2, 4
WARM_UP = 32  # batches that are not timed: processes start meanwhile
DECODE_S = 2e-3
RUNS = [
    ("hogwild", 1, LOADER_PROCESSES),
    ("hogwild", 2, LOADER_PROCESSES // 2),
    ("lockstep", 2, LOADER_PROCESSES // 2),
    ("all-reduce", 2, LOADER_PROCESSES // 2),
    ("ad-psgd", 2, LOADER_PROCESSES // 2),
    ("hogwild", 2, 0),
]


class Decoded(Dataset[tuple[torch.Tensor, int]]):
    """Samples that take their time."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(DECODE_S)
        return torch.full((64,), index / SAMPLES), index % 10


def parts(processes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """A small model, its optimizer, and a loader with so many processes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    loader = DataLoader(
        Decoded(), batch_size=BATCH_SIZE, shuffle=True, num_workers=processes, persistent_workers=processes > 0
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01), loader


def epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> list[float]:
    """Trains on them; when each step ended, in seconds."""
    ends = []
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        ends.append(time.perf_counter())
    return ends


def samples_per_s(ends: list[float]) -> float:
    """After the warm-up."""
    timed = sorted(ends)[WARM_UP:]
    return BATCH_SIZE * (len(timed) - 1) / (timed[-1] - timed[0])


def plain() -> float:
    """The loop without Paceline."""
    model, optimizer, loader = parts(LOADER_PROCESSES)
    return samples_per_s([end for _ in range(EPOCHS) for end in epoch(model, optimizer, loader)])


class Loop:
    """The same with two lines more.

    Args:
        processes: of each worker's loader.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes

    def __call__(self) -> None:
        """One worker."""
        model, optimizer, loader = parts(self.processes)
        with pl.attach(model, optimizer) as worker:
            for _ in range(EPOCHS):
                epoch(model, optimizer, worker.batches(loader))


def launched(algorithm: str, workers: int, processes: int) -> float:
    """Of all workers together."""
    run = pl.launch(Loop(processes), workers=workers, algorithm=algorithm)
    return samples_per_s([float(end) for rows in run.records.values() for end in rows["ended_s"]])


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "loader_processes.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    alone = [plain()]
    ratios: list[list[float]] = [[] for _ in RUNS]
    for _ in range(arguments.repetitions):
        for run, found in zip(RUNS, ratios, strict=True):
            speed = launched(*run)
            alone.append(plain())
            found.append(2 * speed / sum(alone[-2:]))
            print(*run, f"{found[-1]:.3f}", f"load {os.getloadavg()[0]:.0f}", flush=True)
    rows = [
        f"| {algorithm} | {workers} | {processes} | {statistics.median(found):.3f} | {min(found):.3f} to {max(found):.3f} |"
        for (algorithm, workers, processes), found in zip(RUNS, ratios, strict=True)
    ]
    about, package = machine(), versions()
    ideal = LOADER_PROCESSES / DECODE_S
    text = [
        "# What `launch` costs where a loader's own processes make the batches",
        "",
        f"{about['processor']}, {about['cores']} cores; Python {package['python']}, torch {package['torch']}. Every sample"
        f" sleeps for {DECODE_S * 1e3:g} ms; batches of {BATCH_SIZE}; the plain loop's loader has {LOADER_PROCESSES}"
        f" processes. Samples per second after {WARM_UP} batches of {EPOCHS * SAMPLES // BATCH_SIZE}, as shares of the plain"
        f" loop's in the runs before and after; {arguments.repetitions} runs of each, in turn. Made by"
        f" `python benchmarks/loader_processes.py --repetitions {arguments.repetitions}`.",
        "",
        f"The plain loop made {statistics.median(alone):,.0f} samples per second ({min(alone):,.0f} to {max(alone):,.0f}), of"
        f" {ideal:,.0f} that the sleep alone would allow.",
        "",
        "| algorithm | workers | loader processes of each | median | from, to |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "Target: 0.97 where the workers' loaders have as many processes as the plain loop's. The last row is the control,"
        " without loader processes: two workers fetch two samples at a time, and must miss it.",
    ]
    arguments.out.write_text("\n".join([*text, ""]))


if __name__ == "__main__":
    main()
