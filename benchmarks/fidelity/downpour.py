"""Downpour SGD, simulated: AdaGrad or one fixed rate, how rarely workers may talk, and where the servers' network ends it.

    python benchmarks/fidelity/downpour.py --write

Published: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012: AdaGrad at the servers, with a warm start by one
replica, lets more replicas work together than a fixed rate does. For the slow worker see `slow_worker.py`.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from page import show

import paceline as pl
from paceline.algorithms.server.registries import apply_registry
from paceline.simulator import Cluster, Normal

REPLICAS = (8, 32)
RULES = {
    "fixed rate": ("downpour(apply=sgd)", [0.003125 * 2**power for power in range(8)]),
    "fixed rate, warm start": (
        "downpour(apply=sgd, warm_start_steps=180)",
        [0.003125 * 2**power for power in range(8)],
    ),
    "AdaGrad": ("downpour", [0.00125 * 2**power for power in range(8)]),
    "AdaGrad, warm start": ("downpour(warm_start_steps=180)", [0.00125 * 2**power for power in range(8)]),
}
EPOCHS, BATCH, SEEDS = 8, 8, 3
GOOD = 0.90  # test accuracy
PERIODS = (1, 2, 5, 10, 20, 40, 80)
WORKERS = (2, 4, 8, 16, 32, 64)
PARAMETERS, BANDWIDTH_BYTES_PER_S, COMPUTE_S = 1_000_000, 1.25e9, 0.05
FACTORS = (1, 2, 10, 100)


def trained(algorithm: str, workers: int, rate: float) -> tuple[float, float]:
    """Medians over the seeds of the final test accuracy and test loss, with real gradients on digits."""
    accuracies, losses = [], []
    for seed in range(SEEDS):
        config = pl.TrainConfig(
            algorithm=algorithm, workers=workers, epochs=EPOCHS, batch_size=BATCH, learning_rate=rate, seed=seed
        )
        cluster = Cluster(workers=workers, compute_s=Normal(average_s=0.01, deviation_s=0.002))
        result = pl.simulate_task(config, cluster=cluster).result
        diverged = result["outcome"] == "diverged"
        accuracies.append(0.1 if diverged else result["test_accuracy"])
        losses.append(float("inf") if diverged or result["test_loss"] is None else result["test_loss"])
    return statistics.median(accuracies), statistics.median(losses)


def timed(algorithm: str, cluster: Cluster, parameters: int, **length: Any) -> dict[str, Any]:
    """A run without gradients."""
    config = pl.TrainConfig(algorithm=algorithm, workers=cluster.workers, batch_size=BATCH, **length)
    return pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=parameters).result


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A table in markdown."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def rates() -> list[str]:
    """AdaGrad against a fixed rate."""
    lines = [
        "## AdaGrad and a fixed rate",
        "",
        f"Final test accuracy in % on `digits-mlp`, {EPOCHS} epochs in batches of {BATCH}, median of {SEEDS} seeds; rates are"
        f" doubled from left to right, beginning at {RULES['fixed rate'][1][0]:g} (fixed) and {RULES['AdaGrad'][1][0]:g}"
        f" (AdaGrad). A rate is good where the accuracy is {GOOD:.0%} or more. The warm start is one epoch.",
        "",
    ]
    num_rates = len(RULES["AdaGrad"][1])
    header = ["replicas", "rule", *[f"x{2**power}" for power in range(num_rates)], "good rates", "best"]
    rows = []
    for replicas in REPLICAS:
        for name, (spec, tried) in RULES.items():
            found = [trained(spec, replicas, rate)[0] for rate in tried]
            best = max(range(num_rates), key=found.__getitem__)
            good = sum(accuracy >= GOOD for accuracy in found)
            cells = [f"{100 * accuracy:.1f}" for accuracy in found]
            rows.append([str(replicas), name, *cells, str(good), f"{100 * found[best]:.1f} at {tried[best]:g}"])
    return [*lines, *table(header, rows)]


def periods() -> list[str]:
    """How rarely workers may talk."""
    lines = [
        "## Rare communication",
        "",
        f"n_fetch = n_push = n, 8 replicas, AdaGrad at 0.01, {EPOCHS} epochs, median of {SEEDS} seeds. Beside it n_push alone"
        " (parameters fetched at every step), and n_fetch alone (gradients pushed at every step).",
        "",
    ]
    rows = []
    for n in PERIODS:
        cells = [str(n)]
        for spec in (f"fetch={n}, push={n}", f"push={n}", f"fetch={n}"):
            accuracy, loss = trained(f"downpour({spec})", 8, 0.01)
            cells.append(f"{100 * accuracy:.1f}, {loss:.3f}")
        rows.append(cells)
    header = ["n", "both: accuracy %, test loss", "push only", "fetch only"]
    return [*lines, *table(header, rows)]


def congestion() -> list[str]:
    """Time per update against the number of workers."""
    lines = [
        "## The servers' network",
        "",
        f"Milliseconds of virtual time per gradient, all workers together: {4 * PARAMETERS / 1e6:g} MB of parameters,"
        f" {BANDWIDTH_BYTES_PER_S / 1e9:g} GB/s per machine and direction, {1000 * COMPUTE_S:g} ms to compute. Ideal is"
        " computing alone; a server cannot take a gradient sooner than it arrives.",
        "",
    ]
    specs = {
        "1 shard": "downpour",
        "4 shards": "downpour(shards=4)",
        "1 shard, fetch = push = 10": "downpour(fetch=10, push=10)",
    }
    rows = []
    for workers in WORKERS:
        cells = [str(workers), f"{1000 * COMPUTE_S / workers:.2f}"]
        for spec in specs.values():
            cluster = Cluster(workers=workers, compute_s=COMPUTE_S, bandwidth_bytes_per_s=BANDWIDTH_BYTES_PER_S)
            result = timed(spec, cluster, PARAMETERS, steps=100)
            cells.append(f"{1000 * result['wall_s'] / result['computed_gradients']:.2f}")
        rows.append(cells)
    bound_ms = 1000 * 4 * PARAMETERS / BANDWIDTH_BYTES_PER_S
    vectors = 2 + apply_registry.build("adagrad").update_vectors
    served_ms = 1000 * vectors * 4 * PARAMETERS / Cluster().core_bytes_per_s
    last = (
        f"One gradient takes {bound_ms:.1f} ms to arrive at one shard, which then needs {served_ms:.1f} ms to apply and answer"
        f" it: AdaGrad and the answer's copy read and write {vectors:.0f} vectors. From there on, more workers only wait. Made"
        " again since simulations charge that, and the workers' copies (`docs/simulated_traffic.md`); before, one shard came"
        " down to 3.2 ms. A synchronous server, with 16 gradients to add up in each step, has more time that a slow worker"
        " does not make longer: 48 times at 100x in the table below, before 55."
    )
    return [*lines, *table(["workers", "ideal", *specs], rows), "", last]


def slow_worker() -> list[str]:
    """The asynchronous parameter server's row of the slow-worker table."""
    lines = [
        "## One slow worker of 16",
        "",
        "Time for the same total of samples, times the undisturbed time, as in `slow_worker.md`.",
        "",
    ]
    header = [
        "slower",
        "async parameter server (A-PSGD)",
        "downpour, fetch = push = 4",
        "sync",
        "sync, 1 backup",
        "ideal",
    ]
    specs = [
        "parameter-server(mode=async)",
        "downpour(fetch=4, push=4)",
        "parameter-server",
        "parameter-server(mode=sync(backups=1))",
    ]
    rows, base = [], {}
    for factor in FACTORS:
        cells = [f"{factor}x"]
        for spec in specs:
            cluster = Cluster(workers=16, compute_s=Normal(average_s=0.02, deviation_s=0.001)).slow(
                worker=0, factor=factor
            )
            config = pl.TrainConfig(algorithm=spec, workers=16, epochs=200 * 16 / 180, batch_size=BATCH)
            run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=270_000)
            # Without the end of the slow worker's last step, which is late by itself; per gradient that was applied.
            end_s = max(float(rows["ended_s"][-1]) for worker, rows in run.records.items() if worker)
            per_gradient_s = end_s / sum(run.result["updates_per_worker"])
            cells.append(f"{per_gradient_s / base.setdefault(spec, per_gradient_s):.2f}")
        rows.append([*cells, f"{16 / (15 + 1 / factor):.2f}"])
    return [*lines, *table(header, rows)]


def main() -> None:
    """Print the tables as markdown."""
    torch.set_num_threads(1)
    lines = ["# Downpour SGD, simulated", "", "Printed by `python benchmarks/fidelity/downpour.py --write`."]
    for part in (rates, periods, congestion, slow_worker):
        lines += ["", *part()]
    show(lines, __file__)


if __name__ == "__main__":
    main()
