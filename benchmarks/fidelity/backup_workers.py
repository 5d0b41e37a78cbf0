"""How many of 100 machines should be backups? Straggler times as published for Inception, and the choice made from them.

    PACELINE_DATA=... python benchmarks/fidelity/backup_workers.py --write

Published: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981: most of the second-last gradients
arrive within 2 s, about 30 % of the last ones do; 96 workers and 4 backups were best.
Machines here answer within a gamma-distributed time; one answer in a hundred is held up, by a Pareto-distributed factor.
The second part trains with these times: real gradients, simulated time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import paceline as pl
from paceline.algorithms.server.backups import BackupController, StepsModel, choose_backups
from paceline.observe.summary import WINDOW, loss_curve
from paceline.simulator.cluster import Cluster
from paceline.simulator.compute import Recorded

MACHINES, STEPS = 100, 40_000
BODY_SHAPE, BODY_SCALE_S = 100.0, 0.0152  # 1.52 s on average, deviation 0.15 s
HELD_UP, PARETO_TAIL, LONGEST_S = 0.01, 1.1, 310.0
SHOWN = (50, 90, 96, 98, 99, 100)
TASK, BATCH_SIZE, EPOCHS, TARGET_LOSS = "mnist-mlp", 16, 2.25, 0.8
SYNC_RATE, ASYNC_RATES = 0.3, (0.001, 0.002, 0.005)  # of the asynchronous ones, that with the best accuracy is compared
TRAINED_BACKUPS = (0, 4, 8, 25)


def arrival_times(steps: int, machines: int, seed: int) -> np.ndarray:
    """Seconds (steps, machines) from the start of a step to each gradient."""
    draws = np.random.default_rng(seed)
    times_s = draws.gamma(BODY_SHAPE, BODY_SCALE_S, (steps, machines))
    held_up = draws.random((steps, machines)) < HELD_UP
    times_s[held_up] *= 1 + draws.pareto(PARETO_TAIL, int(held_up.sum()))
    return np.minimum(times_s, LONGEST_S)


def choices_online(runs: int) -> list[int]:
    """What `backups=auto` has chosen after 200 steps, in independent runs."""
    chosen = []
    for run in range(runs):
        controller = BackupController(MACHINES, every_steps=50, window=200, max_backups=25)
        for step, row in enumerate(arrival_times(200, MACHINES, seed=1000 + run)):
            for worker, time_s in enumerate(row):
                controller.arrived(worker, float(time_s))
            controller.step_done(step)
        chosen.append(controller.backups)
    return chosen


def trained(spec: str, learning_rate: float) -> tuple[str, float | None, float, float]:
    """Training with these times: a table's row, and its time to the target loss, time in all and final test accuracy."""
    trace_s = arrival_times(500, MACHINES, seed=2).flatten().tolist()
    run = pl.simulate_task(
        pl.TrainConfig(task=TASK, algorithm=spec, epochs=EPOCHS, batch_size=BATCH_SIZE, learning_rate=learning_rate),
        cluster=Cluster(workers=MACHINES, compute_s=Recorded(times_s=tuple(trace_s))),
    )
    curve = loss_curve(run.records, lockstep="async" not in spec)
    reached = np.flatnonzero(curve.average[WINDOW:] <= TARGET_LOSS)
    to_loss_s = float(curve.time_s[WINDOW + reached[0]]) if len(reached) else None
    result = run.result
    updates_per_s = result["steps"] / result["wall_s"]
    row = (
        f"| {spec} | {learning_rate:g} | {result['steps']:,} | {updates_per_s:.3f} | {result['dropped_updates']:,} |"
        f" {f'{to_loss_s:,.0f}' if to_loss_s is not None else 'never'} | {100 * result['test_accuracy']:.2f} |"
    )
    print(row, flush=True)
    return row, to_loss_s, result["wall_s"], result["test_accuracy"]


def training_lines() -> list[str]:
    """The second part: what training with these times makes of it."""
    lines = [
        "",
        "## Real gradients",
        "",
        f"The same machines train {TASK} for {EPOCHS:g} epochs with batches of {BATCH_SIZE} each: every gradient is computed,"
        f" in simulated time; time to a training loss of {TARGET_LOSS:g} is that of the mean over {WINDOW} gradients.",
        "",
        "| algorithm | learning rate | updates | updates per s | gradients dropped | time to the loss, s | test accuracy, % |",
        "|---|---|---|---|---|---|---|",
    ]
    sync = {b: trained(f"parameter-server(backups={b})", SYNC_RATE) for b in TRAINED_BACKUPS}
    free = [trained("parameter-server(mode=async)", rate) for rate in ASYNC_RATES]
    lines += [row for row, *_ in (*sync.values(), *free)]
    never = float("inf")
    best = min(sync, key=lambda b: sync[b][1] or never)
    soonest, most_accurate = min(one[1] or never for one in free), max(one[3] for one in free)
    lines += [
        "",
        f"Soonest at the loss: b = {best}, after {_seconds(sync[best][1])}; without backups {_seconds(sync[0][1])},"
        f" asynchronously {_seconds(soonest)}. Test accuracy in the end: {100 * sync[best][3]:.2f} % against"
        f" {100 * most_accurate:.2f} % asynchronously.",
        "",
        "A worker that is held up for long is missing in many steps, and uses a backup up in each: so steps with few backups"
        " take longer here than above, where all workers begin each step together.",
    ]
    return lines


def _seconds(time_s: float | None) -> str:
    return f"{time_s:,.0f} s" if time_s is not None and time_s < float("inf") else "never"


def main() -> None:
    """Print the tables as markdown."""
    times_s = arrival_times(STEPS, MACHINES, seed=0)
    in_order = np.sort(times_s, axis=1)
    choice = choose_backups(times_s)
    plain = choose_backups(times_s, StepsModel(half_efficient=float("inf")))
    lines = ["# Backup workers of 100 machines, simulated", ""]
    lines += ["Printed by `python benchmarks/fidelity/backup_workers.py --write`.", ""]
    lines += [
        f"Times of {STEPS:,} steps. Within 2 s arrives the second-last gradient of {np.mean(in_order[:, 98] < 2):.0%} of the"
        f" steps, the last of {np.mean(in_order[:, 99] < 2):.0%} (published: about 80 % and 30 %).",
        "",
        "| k | " + " | ".join(map(str, SHOWN)) + " |",
        "|---" * (1 + len(SHOWN)) + "|",
        "| mean time to the k-th gradient, s | " + " | ".join(f"{in_order[:, k - 1].mean():.2f}" for k in SHOWN) + " |",
        "",
        "Total time is step time times steps to converge: as 1 + 411 / N, or, in the last column, as 1 / N.",
        "",
        "| backups b | step, s | total / b = 0 | step's speed-up x share of workers | total / b = 0, steps as 1 / N |",
        "|---|---|---|---|---|",
    ]
    for row, other in zip(choice.rows, plain.rows, strict=True):
        if row.backups <= 10 or row.backups % 5 == 0:
            mark = " (best)" if row is choice.best else ""
            lines.append(
                f"| {row.backups}{mark} | {row.step_s:.3f} | {row.total:.3f} |"
                f" {row.discounted_speed_up:.2f} | {other.total:.3f} |"
            )
    near = choice.within(0.02)
    chosen = choices_online(20)
    at = {row.backups: row.total for row in choice.rows}
    worst = max(at[b] for b in chosen) / choice.best.total - 1
    lines += [
        "",
        f"Within 2 % of the best: b = {near[0]} to {near[-1]}. `backups=auto` after 200 steps of 20 independent runs chose b ="
        f" {min(chosen)} to {max(chosen)}, at worst {worst:.1%} above the best.",
    ]
    text = "\n".join([*lines, *training_lines()]) + "\n"
    print(text)
    if "--write" in sys.argv:
        Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
