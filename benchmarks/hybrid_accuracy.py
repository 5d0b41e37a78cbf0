"""vgg-small trained by all-reduce with whole layers, and with its linear layers cut over groups: accuracy and bytes.

    python benchmarks/hybrid_accuracy.py [--epochs 10] [--seeds 3] [--workers 4] [--task vgg-small] [--done FILE]

Needs CIFAR-10 in the folder that PACELINE_DATA names. Prints a table and writes benchmarks/results/hybrid_accuracy.md. Both
train on the same batches in the same order from the same first parameters, so that what differs is what dropout draws:
without a layout from each worker's generator, under one by sample and feature. With N workers, N groups cut nothing, and one
group is one model in all. With `--done`, trainings that have ended are kept in that file, and are not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import protocol

import paceline as pl
from paceline.model_parallel.hybrid.worker_part import WorkerPart
from paceline.model_parallel.layouts import layout_of
from paceline.system.machine import machine, versions
from paceline.tasks.load import load_task

RESULTS = Path(__file__).parent / "results"
WITHIN = 0.01  # a point of accuracy
ELEMENT_BYTES, COUNT_BYTES = 4, 8  # of float32; of a number of rows, which each worker tells all others in every step


def layouts(workers: int) -> list[str | None]:
    """Pure data, and every number of groups that cuts something."""
    return [None, *(f"hybrid(groups={groups})" for groups in range(workers - 1, 0, -1) if workers % groups == 0)]


def planned_bytes(layout: str | None, task: str, workers: int, batch_size: int) -> float:
    """What one worker sends in a step in which all have whole batches: the layout's plan, and all-reduces by rings."""
    net = load_task(task).model()
    weights = sum(one.numel() for one in net.parameters())
    ring = 2 * (workers - 1) / workers
    if layout is None:
        return ring * weights * ELEMENT_BYTES
    part = WorkerPart(layout_of(layout), net, 0, workers, seed=0)
    plan, sharding = part.plan, part.sharding
    groups = workers // plan.parts
    alike = ring * sharding.first_cut
    shards = 2 * (groups - 1) / groups * (sharding.num_local - sharding.first_cut)
    return plan.group_bytes(batch_size, ELEMENT_BYTES) + (alike + shards) * ELEMENT_BYTES + (workers - 1) * COUNT_BYTES


def run(layout: str | None, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One training: its test accuracy, and the bytes that a worker sends in a usual step."""
    config = pl.TrainConfig(
        task=options.task,
        workers=options.workers,
        epochs=options.epochs,
        algorithm="all-reduce",
        layout=layout,
        seed=seed,
        checkpoint_every_s=1e9,
    )
    done = pl.train(config)
    if done.result["outcome"] != "converged" and done.result["outcome"] != "stopped":
        raise SystemExit(f"{layout or 'pure data'}, seed {seed}: {done.result['outcome_reason']}")
    sent = np.concatenate([records["sent_bytes"] for records in done.records.values()])
    return {"accuracy": done.result["test_accuracy"], "sent_bytes": float(np.median(sent))}


def table(runs: dict[str | None, list[dict[str, Any]]], planned: dict[str | None, float]) -> list[str]:
    """Accuracy by layout, its distance from pure data's, and bytes beside the plan's."""
    rows = [
        "| layout | test accuracy, mean (lowest to highest) | points from pure data | bytes per step | the plan's |",
        "|---|---|---|---|---|",
    ]
    base = statistics.mean(one["accuracy"] for one in runs[None])
    for layout, done in runs.items():
        accuracies = [one["accuracy"] for one in done]
        mean = statistics.mean(accuracies)
        sent = f"{statistics.median(one['sent_bytes'] for one in done):,.0f}" if layout else "not counted"
        rows.append(
            f"| {layout or 'none: pure data'} | {mean:.2%} ({min(accuracies):.2%} to {max(accuracies):.2%}) |"
            f" {100 * (mean - base):+.2f} | {sent} | {planned[layout]:,.0f} |"
        )
    return rows


def verdict(runs: dict[str | None, list[dict[str, Any]]]) -> str:
    """Whether each layout's mean is pure data's within a point; how far apart they are by seed, and pure data's seeds."""
    means = {layout: statistics.mean(one["accuracy"] for one in done) for layout, done in runs.items()}
    base = [one["accuracy"] for one in runs[None]]
    far = [f"{layout}" for layout, mean in means.items() if abs(mean - means[None]) > WITHIN]
    apart = max(abs(one["accuracy"] - b) for done in runs.values() for one, b in zip(done, base, strict=True))
    said = (
        f"Not within a point of pure data: {', '.join(far)}." if far else "All layouts are within a point of pure data."
    )
    if len(base) == 1:
        return f"{said} With one seed nothing is known of how far apart seeds lie, so that this is a first look."
    return (
        f"{said} With one seed they differ by {100 * apart:.2f} points at most; pure data's own seeds lie"
        f" {100 * (max(base) - min(base)):.2f} points apart."
    )


def page(
    runs: dict[str | None, list[dict[str, Any]]], planned: dict[str | None, float], options: argparse.Namespace
) -> list[str]:
    """All of it."""
    about, with_ = machine(), versions()
    return [
        "# Linear layers cut over groups: accuracy and bytes",
        "",
        f"Machine: {about['processor']}, {about['cores']} cores. Python {with_['python']}, PyTorch {with_['torch']}.",
        f"Command: `python benchmarks/hybrid_accuracy.py --epochs {options.epochs:g} --seeds {options.seeds} --workers"
        f" {options.workers} --task {options.task}`.",
        "",
        f"{options.task} trained by `all-reduce` on {options.workers} workers for {options.epochs:g} epochs, with"
        f" {options.seeds} seed{'s' * (options.seeds > 1)}: the same batches from the same parameters in each row. What"
        " differs is what dropout draws, and the order of additions. Bytes are the median of a worker's steps, as rings would"
        " send float32; in shared memory nobody counts them without a layout.",
        "",
        *table(runs, planned),
        "",
        verdict(runs),
    ]


class Done:
    """Trainings that have ended, in a file of one line each; in memory only without one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._found: dict[str, Any] = dict(protocol.read(file)) if file is not None else {}

    def run(self, layout: str | None, seed: int, options: argparse.Namespace) -> dict[str, Any]:
        """What `run` came to before, or comes to now."""
        key = json.dumps([layout, seed, options.task, options.workers, options.epochs])
        if key not in self._found:
            self._found[key] = run(layout, seed, options)
            if self._file is not None:
                protocol.append(self._file, [key, self._found[key]])
        return self._found[key]


def main() -> None:
    """Trains with each seed and layout in turn, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--task", default="vgg-small")
    parser.add_argument("--out", type=Path, default=RESULTS / "hybrid_accuracy.md", help="where the page is written")
    parser.add_argument("--done", type=Path, help="where ended trainings are kept, to go on from")
    options = parser.parse_args()
    batch_size = load_task(options.task).batch_size
    chosen = layouts(options.workers)
    planned = {layout: planned_bytes(layout, options.task, options.workers, batch_size) for layout in chosen}
    runs: dict[str | None, list[dict[str, Any]]] = {layout: [] for layout in chosen}
    done = Done(options.done)
    for seed in range(options.seeds):
        for layout in chosen:
            runs[layout].append(done.run(layout, seed, options))
            print(f"seed {seed}, {layout or 'pure data'}: {runs[layout][-1]}", flush=True)
    lines = page(runs, planned, options)
    print("\n".join(lines))
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
