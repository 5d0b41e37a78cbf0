"""What recording costs: the time of a step with all records, in a run with a folder, over that of a step without any.

    python benchmarks/recording.py [--pairs 12] [--out FILE]

Prints a table and writes benchmarks/results/recording.md. Two worker processes train an MLP (784, 256, 10) on drawn samples at
batch 16. Two figures check each other. The share is measured within a run: the time that a worker spends appending records,
and the supervisor's time for taking them from shared memory and writing them, over the time of the run. The ratio compares
two runs that differ in the records alone: one has a folder, into which the supervisor writes what workers record; in the
other one this file, which is also the task, replaces the method by which workers append a record, and there is no folder. Who
goes first alternates. The task itself notes when each step computes its loss; a run's time of a step is the median interval
between two of these, of the worker whose median is larger, without the first steps. Replays need the records of steps, which
a run has anyway, and `order.npz` under methods whose steps do not have the order: its bytes are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import protocol
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.memory.ring import RecordRing
from paceline.run.spool import Spool
from paceline.system.machine import machine, versions

RESULTS = Path(__file__).parent / "results"
METHODS = ("locked", "leashed", "parameter-server(mode=async)", "downpour", "ad-psgd", "all-reduce")
BATCH_SIZE, STEPS, WARM_UP = 16, 500, 100
TIMES, IS_RECORDED = "RECORDING_TIMES", "RECORDING_IS_ON"  # environment variables of the workers
SHARE, MOST_BYTES = 0.02, 32  # what recording may cost of a step, and per update


def timed(owner: type, name: str, clock: Callable[[], float]) -> Callable[[], float]:
    """Replaces a method by one that adds up its seconds, which the result returns."""
    method, spent = getattr(owner, name), [0.0]

    def measured(*arguments: Any) -> Any:
        begun_s = clock()
        try:
            return method(*arguments)
        finally:
            spent[0] += clock() - begun_s

    setattr(owner, name, measured)
    return lambda: spent[0]


if __name__ == "__main__":
    draining_s = timed(Spool, "drain", time.thread_time)
else:  # the task, in a worker
    if os.environ.get(IS_RECORDED) == "no":
        RecordRing.append = lambda *_: None  # type: ignore[method-assign]
    appending_s = timed(RecordRing, "append", time.perf_counter)


class TimedLoss:
    """Cross entropy; writes the median interval between two steps once a worker has made its last one."""

    def __init__(self) -> None:
        self.noted_s: list[float] = []

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            self.noted_s.append(time.perf_counter())
            if len(self.noted_s) == STEPS and (folder := os.environ.get(TIMES)):
                interval_s = float(np.median(np.diff(self.noted_s[WARM_UP:])))
                text = json.dumps([interval_s, appending_s() / (self.noted_s[-1] - self.noted_s[0])])
                (Path(folder) / str(os.getpid())).write_text(text)
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


def step_s(algorithm: str, folder: Path, *, records: bool) -> tuple[float, float, pl.RunData]:
    """The time of a step, the share of it in which a worker appends and the supervisor empties and writes, and the run."""
    times = folder / "times"
    times.mkdir(parents=True)
    os.environ |= {TIMES: str(times), IS_RECORDED: "yes" if records else "no"}
    config = pl.TrainConfig(
        task=f"{Path(__file__).resolve()}:task", algorithm=algorithm, workers=2, steps=STEPS, epochs=None
    )
    drained_s = draining_s()
    run = pl.train(config, out=folder / "run" if records else None)
    steps_s, appending_shares = zip(*(json.loads(path.read_text()) for path in times.iterdir()), strict=True)
    share = max(appending_shares) + (draining_s() - drained_s) / run.result["wall_s"] if records else 0.0
    return max(steps_s), share, run


def bytes_per_update(run: pl.RunData, folder: Path) -> tuple[float, float]:
    """Of what replays need beyond the records of steps, and of all events as the folder keeps them."""
    updates = sum(int(np.count_nonzero(rows["applied_version"] > 0)) for rows in run.records.values())
    own = sum(rows.nbytes for rows in run.order.values())
    events = sum(path.stat().st_size for path in folder.glob("events-*"))
    return own / updates, events / updates


def measured(algorithm: str, pairs: int) -> dict[str, Any]:
    """One row of the table."""
    ratios, steps_s, shares, sizes = [], [], [], (0.0, 0.0)
    for pair in range(pairs):
        found: dict[bool, float] = {}
        for records in (True, False) if pair % 2 else (False, True):
            with tempfile.TemporaryDirectory() as name:
                found[records], share, run = step_s(algorithm, Path(name), records=records)
                if records:
                    shares.append(share)
                    sizes = bytes_per_update(run, Path(name) / "run")
        ratios.append(found[True] / found[False])
        steps_s.append(found[False])
    row = {"algorithm": algorithm, "ratio": statistics.median(ratios), "interval": protocol.interval(ratios)[:2],
           "share": statistics.median(shares), "sizes": sizes, "step_s": statistics.median(steps_s)}  # fmt: skip
    print(row, flush=True)
    return row


def markdown(rows: list[dict[str, Any]], pairs: int) -> str:
    """The page."""
    here, found = machine(), versions()
    lines = [
        "# What recording costs",
        "",
        f"Machine: {here['processor']}, {os.cpu_count()} cores. Python {found['python']}, PyTorch {found['torch']}. Command: "
        f"`python benchmarks/recording.py --pairs {pairs}`.",
        f"Two workers, batch {BATCH_SIZE}; medians over {pairs} pairs of runs in turn, in brackets an interval of at least 90"
        " % for the median; less is better. The records' own share is what workers spend appending them and the supervisor"
        f" spends writing them, measured within the run. The aim is at most {100 * SHARE:.0f} % of a step, and {MOST_BYTES}"
        " bytes more per update for replays. What is measured in detail: `benchmarks/recording.py`.",
        "",
        "| method | step without records | records' own share, % | step with records over without | bytes per update for"
        " replays alone | bytes per update of all events |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        (low, high), (own, events) = row["interval"], row["sizes"]
        lines.append(
            f"| `{row['algorithm']}` | {row['step_s'] * 1e6:.0f} us | **{100 * row['share']:.1f}** |"
            f" {row['ratio']:.3f} ({low:.3f} to {high:.3f}) | {own:.1f} | {events:.0f} |"
        )
    groups = {
        "Records' own share above the aim": [row for row in rows if row["share"] > SHARE],
        "steps that are longer with records by more than the aim": [
            row for row in rows if row["interval"][0] > 1 + SHARE
        ],
        "bytes for replays above the aim": [row for row in rows if row["sizes"][0] > MOST_BYTES],
    }
    names = {what: ", ".join(f"`{row['algorithm']}`" for row in own) or "none" for what, own in groups.items()}
    said = "; ".join(f"{what}: {own}" for what, own in names.items()) + "."
    busy = f"Load average at the end: {os.getloadavg()[0]:.1f}; above 3, other programs ran beside it."
    return "\n".join([*lines, "", said, busy]) + "\n"


def main() -> None:
    """Measures, prints and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=12, help="pairs of runs for each method")
    parser.add_argument("--out", type=Path, default=RESULTS / "recording.md")
    arguments = parser.parse_args()
    if arguments.pairs < 5:
        parser.error("fewer than five pairs have no interval of 90 %: give --pairs 5 or more")
    text = markdown([measured(one, arguments.pairs) for one in METHODS], arguments.pairs)
    print(text)
    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
