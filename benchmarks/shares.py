"""Two workers, one half as fast: all-reduce with batches by speed, with equal ones, and DDP, in turn.

    python benchmarks/shares.py [--repeats 3] [--samples 24000] [--per-sample-ms 2]

Needs MNIST in the folder that PACELINE_DATA names. Prints a table and writes benchmarks/results/shares.md.
All three run the same loop in processes of their own, as torchrun starts them, over Gloo, on the same global batches of 2 x 64
in the same order. A worker's speed is a timed sleep for each of its samples, twice as long on worker 0, as on a machine half
as fast; the network's own computing comes on top. Times are from the first step to the last, start and end left out.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.data.plan import BatchPlan
from paceline.system.machine import machine, versions
from paceline.tasks.load import load_task

RESULTS = Path(__file__).parent / "results"
SYSTEMS = {
    "all-reduce(shares=auto)": "Paceline, `all-reduce(shares=auto)`",
    "all-reduce": "Paceline, `all-reduce`",
    "ddp": "DDP, equal batches",
}
BATCH_SIZE, LEARNING_RATE, SEED, WORKERS, SLOW = 64, 0.1, 0, 2, 2.0
SETTLED = 20  # steps: what comes after them is said apart


def sets(samples: int) -> tuple[TensorDataset, TensorDataset]:
    """The first so many samples, and the test set."""
    train_set, test_set = load_task("mnist-mlp").load(Path(os.environ["PACELINE_DATA"]))
    return TensorDataset(*(one[:samples] for one in train_set.tensors)), test_set


def model() -> nn.Module:
    """The same on all workers."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def train(net: nn.Module, optimizer: Any, batches: Iterator[Any], per_sample_s: float) -> dict[str, Any]:
    """The loop of all three; when each step ended, and how many samples it had."""
    ended_s, sizes = [], []
    for x, y in batches:
        time.sleep(per_sample_s * len(x))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        ended_s.append(time.perf_counter())
        sizes.append(len(x))
    return {"ended_s": ended_s, "sizes": sizes}


def accuracy(net: nn.Module, test_set: TensorDataset) -> float:
    """On the test set."""
    inputs, targets = test_set.tensors
    with torch.no_grad():
        return (net(inputs).argmax(1) == targets).double().mean().item()


def worker(system: str, samples: int, per_sample_s: float) -> None:
    """One worker's process: prints a line of JSON."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    train_set, test_set = sets(samples)
    per_sample_s *= SLOW if rank == 0 else 1.0
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    if system == "ddp":
        dist.init_process_group("gloo")
        plan = BatchPlan(num_samples=samples, batch_size=BATCH_SIZE, seed=SEED, drop_last=True)
        mine = range(rank, plan.batches_per_epoch // WORKERS * WORKERS, WORKERS)
        batches = (train_set[plan.indices(number)] for number in mine)
        told = train(nn.parallel.DistributedDataParallel(net), optimizer, batches, per_sample_s)
        dist.destroy_process_group()
    else:
        loader = DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
        with pl.attach(net, optimizer, system) as one:
            told = train(net, optimizer, iter(one.batches(loader)), per_sample_s)
    print(json.dumps({**told, "accuracy": accuracy(net, test_set)}), flush=True)


def run(system: str, options: argparse.Namespace) -> dict[str, float]:
    """One training: samples per second of both workers, over all steps and over the settled ones, and the accuracy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(WORKERS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--worker", system, "--samples", str(options.samples)]
    command += ["--per-sample-ms", str(options.per_sample_ms)]
    started = [
        subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(WORKERS)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{system}: a worker has failed; see its output above.")
    told = [json.loads(output.splitlines()[-1]) for output in outputs]
    steps = [sum(sizes) for sizes in zip(*(one["sizes"] for one in told), strict=True)]

    def samples_per_s(first: int) -> float:
        begun_s = max(one["ended_s"][first] for one in told)
        return sum(steps[first + 1 :]) / (max(one["ended_s"][-1] for one in told) - begun_s)

    return {
        "samples_per_s": samples_per_s(0),
        "settled_per_s": samples_per_s(SETTLED),
        "accuracy": told[0]["accuracy"],
        "steps": len(steps),
        "last_size": told[0]["sizes"][-1],
    }


def table(runs: dict[str, list[dict[str, float]]]) -> list[str]:
    """Medians, and how much faster than DDP in the same turn."""

    def median(system: str, of: Callable[[int, dict[str, float]], float]) -> float:
        return statistics.median(of(turn, one) for turn, one in enumerate(runs[system]))

    rows = [
        f"| system | samples/s | after step {SETTLED} | times DDP's | times `all-reduce`'s | test accuracy (%) |"
        " worker 0's last batch |",
        "|---|---|---|---|---|---|---|",
    ]
    for system, name in SYSTEMS.items():
        figures = [median(system, lambda _, one, key=key: one[key]) for key in ("samples_per_s", "settled_per_s")]
        ratios = [
            median(system, lambda turn, one, peer=peer: one["samples_per_s"] / runs[peer][turn]["samples_per_s"])
            for peer in ("ddp", "all-reduce")
        ]
        accuracies = sorted({f"{one['accuracy'] * 100:.2f}" for one in runs[system]})
        sizes = sorted({int(one["last_size"]) for one in runs[system]})
        rows.append(
            f"| {name} | {figures[0]:.0f} | {figures[1]:.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |"
            f" {', '.join(accuracies)} | {', '.join(map(str, sizes))} |"
        )
    return rows


def main() -> None:
    """Runs the systems in turn, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=24_000, help="of which whole steps are used")
    parser.add_argument("--per-sample-ms", type=float, default=2.0, help="of the fast worker")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.samples -= options.samples % (WORKERS * BATCH_SIZE)
    if options.worker:
        worker(options.worker, options.samples, options.per_sample_ms / 1000)
        return
    runs: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for _ in range(options.repeats):
        for system in SYSTEMS:
            runs[system].append(run(system, options))
            print(f"{system}: {runs[system][-1]}", flush=True)
    rows = table(runs)
    print("\n".join(rows))
    about, with_ = machine(), versions()
    text = [
        "# Batches by speed: two workers, one half as fast",
        "",
        f"Machine: {about['processor']}, {about['cores']} cores. Python {with_['python']}, PyTorch {with_['torch']}.",
        f"Command: `python benchmarks/shares.py --repeats {options.repeats} --samples {options.samples}"
        f" --per-sample-ms {options.per_sample_ms:g}`.",
        "",
        f"One epoch of {options.samples:,} samples of MNIST in steps of 2 x {BATCH_SIZE}, the same in all three. A sample"
        f" takes the fast worker a timed sleep of {options.per_sample_ms:g} ms, the slow one twice that; computing comes on"
        " top."
        f" Medians of {options.repeats} runs each, in turn; ratios are of runs of the same turn. The ideal is 1.5 times equal"
        " batches: the work divided by the sum of the speeds.",
        "",
        *rows,
    ]
    (RESULTS / "shares.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
