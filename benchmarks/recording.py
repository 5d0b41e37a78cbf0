"""What recording costs: the time of a step with all records, in a run with a folder, over that of a step without any.

    python benchmarks/recording.py [--pairs 12] [--out FILE]

Prints a table and writes benchmarks/results/recording.md. Two worker processes train an MLP (784, 256, 10) on drawn samples at
batch 16. The two runs of a pair differ in the records alone: one has a folder, into which the supervisor writes what workers
record; in the other one this file, which is also the task, replaces the method by which workers append a record, and there is
no folder. Who goes first alternates. The task itself notes when each step computes its loss; a run's time of a step is the
median interval between two of these, of the worker whose median is larger, without the first steps. Replays need the records
of steps, which a run has anyway, and `order.npz` under methods whose steps do not have the order: its bytes are counted apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.memory.ring import RecordRing
from paceline.system.machine import machine, versions

RESULTS = Path(__file__).parent / "results"
METHODS = ("locked", "leashed", "parameter-server(mode=async)", "downpour", "ad-psgd", "all-reduce")
BATCH_SIZE, STEPS, WARM_UP = 16, 500, 100
TIMES, IS_RECORDED = "RECORDING_TIMES", "RECORDING_IS_ON"  # environment variables of the workers
SHARE, MOST_BYTES = 0.02, 32  # what recording may cost of a step, and per update

if os.environ.get(IS_RECORDED) == "no":
    RecordRing.append = lambda self, *fields: None  # type: ignore[method-assign]


class TimedLoss:
    """Cross entropy; writes the median interval between two steps once a worker has made its last one."""

    def __init__(self) -> None:
        self.noted_s: list[float] = []

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            self.noted_s.append(time.perf_counter())
            if len(self.noted_s) == STEPS and (folder := os.environ.get(TIMES)):
                interval_s = float(np.median(np.diff(self.noted_s[WARM_UP:])))
                (Path(folder) / str(os.getpid())).write_text(repr(interval_s))
        return nn.functional.cross_entropy(output, target)


def model() -> nn.Module:
    """The MLP."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def datasets(_: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Drawn samples, whose label is their largest feature of ten."""
    x = torch.randn(4096, 784, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :10].argmax(1))
    return data, data


def task() -> pl.Task:
    """The task."""
    return pl.Task(
        name="recording", model=model, datasets=datasets, loss=TimedLoss(), batch_size=BATCH_SIZE, learning_rate=0.01
    )


def step_s(algorithm: str, folder: Path, *, records: bool) -> tuple[float, pl.RunData]:
    """The time of a step, and the run."""
    times = folder / "times"
    times.mkdir(parents=True)
    os.environ |= {TIMES: str(times), IS_RECORDED: "yes" if records else "no"}
    config = pl.TrainConfig(
        task=f"{Path(__file__).resolve()}:task", algorithm=algorithm, workers=2, steps=STEPS, epochs=None
    )
    run = pl.train(config, out=folder / "run" if records else None)
    return max(float(path.read_text()) for path in times.iterdir()), run


def bytes_per_update(run: pl.RunData, folder: Path) -> tuple[float, float]:
    """Of what replays need beyond the records of steps, and of all events as the folder keeps them."""
    updates = sum(int(np.count_nonzero(rows["applied_version"] > 0)) for rows in run.records.values())
    own = sum(rows.nbytes for rows in run.order.values())
    events = sum(path.stat().st_size for path in folder.glob("events-*"))
    return own / updates, events / updates


def measured(algorithm: str, pairs: int) -> dict[str, Any]:
    """One row of the table."""
    ratios, steps_s, sizes = [], [], (0.0, 0.0)
    for pair in range(pairs):
        found: dict[bool, float] = {}
        for records in (True, False) if pair % 2 else (False, True):
            with tempfile.TemporaryDirectory() as name:
                found[records], run = step_s(algorithm, Path(name), records=records)
                if records:
                    sizes = bytes_per_update(run, Path(name) / "run")
        ratios.append(found[True] / found[False])
        steps_s.append(found[False])
    first, _, third = statistics.quantiles(ratios, n=4)
    return {"algorithm": algorithm, "ratio": statistics.median(ratios), "quartiles": (first, third), "sizes": sizes,
            "step_s": statistics.median(steps_s)}  # fmt: skip


def markdown(rows: list[dict[str, Any]], pairs: int) -> str:
    """The page."""
    here, found = machine(), versions()
    lines = [
        "# What recording costs",
        "",
        f"Machine: {here['processor']}, {os.cpu_count()} cores. Python {found['python']}, PyTorch {found['torch']}. Command: "
        f"`python benchmarks/recording.py --pairs {pairs}`.",
        f"Two workers, batch {BATCH_SIZE}; step time with all records over that without any, medians over {pairs} pairs of"
        " runs in turn, in brackets the middle half; less is better. What is measured: `benchmarks/recording.py`. The aim is"
        f" at most {1 + SHARE:.2f}, and {MOST_BYTES} bytes more per update for replays.",
        "",
        "| method | step without records | ratio | bytes per update for replays alone | bytes per update of all events |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        (first, third), (own, events) = row["quartiles"], row["sizes"]
        lines.append(
            f"| `{row['algorithm']}` | {row['step_s'] * 1e6:.0f} us | **{row['ratio']:.3f}** ({first:.3f} to {third:.3f}) |"
            f" {own:.1f} | {events:.0f} |"
        )
    groups = {
        "Within the aim in time": [row for row in rows if row["quartiles"][0] <= 1 <= row["quartiles"][1] <= 1 + SHARE],
        "above it": [row for row in rows if row["quartiles"][0] > 1 + SHARE],
        "the runs of a pair differ in more than records": [row for row in rows if row["quartiles"][1] < 1],
        "above the aim in bytes": [row for row in rows if row["sizes"][0] > MOST_BYTES],
    }
    names = {what: ", ".join(f"`{row['algorithm']}`" for row in own) or "none" for what, own in groups.items()}
    said = "; ".join(f"{what}: {own}" for what, own in names.items()) + ". For the others, these runs do not decide."
    busy = f"Load average at the end: {os.getloadavg()[0]:.1f}; above 3, other programs ran beside it."
    return "\n".join([*lines, "", said, busy]) + "\n"


def main() -> None:
    """Measures, prints and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=12, help="pairs of runs for each method")
    parser.add_argument("--out", type=Path, default=RESULTS / "recording.md")
    arguments = parser.parse_args()
    text = markdown([measured(one, arguments.pairs) for one in METHODS], arguments.pairs)
    print(text)
    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
