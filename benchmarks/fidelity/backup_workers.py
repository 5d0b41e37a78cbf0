"""How many of 100 machines should be backups? Straggler times as published for Inception, and the choice made from them.

    PACELINE_DATA=... python benchmarks/fidelity/backup_workers.py --write

Published: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981: most of the second-last gradients
arrive within 2 s, about 30 % of the last ones do; 96 workers and 4 backups were best.
Machines here answer within a gamma-distributed time; one answer in a hundred is held up, by a Pareto-distributed factor.
The second part trains with these times: real gradients, simulated time.
"""

from __future__ import annotations

import numpy as np
from page import show

import paceline as pl
from paceline.algorithms.server.backups import BackupController
from paceline.planner.backups import plan_arrivals
from paceline.records.summary import WINDOW, loss_curve
from paceline.simulator.cluster import Cluster
from paceline.simulator.compute import Recorded

MACHINES, STEPS = 100, 40_000
BODY_SHAPE, BODY_SCALE_S = 100.0, 0.0152  # 1.52 s on average, deviation 0.15 s
HELD_UP, PARETO_TAIL, LONGEST_S = 0.01, 1.1, 310.0
SHOWN = (50, 90, 96, 98, 99, 100)
TASK, BATCH_SIZE, EPOCHS = "mnist-mlp", 16, 4.5
LOSSES, DECIDING = (0.8, 0.6, 0.4), 1  # times to these losses are shown; the second one's decides
SYNC_RATE, OTHER_SYNC_RATES, ASYNC_RATES = 0.004, (0.002, 0.006, 0.009), (0.002, 0.003, 0.005, 0.01)
TRAINED_BACKUPS = (0, 2, 4, 8, 15, 30)
FURTHER_SEEDS = (1, 2)
FIRST = (
    "Backups shorten training, in simulated time: a few of them reach each loss in less than half of the time "
    "without, and the best number of them sooner than asynchronous training (one seed). Better test accuracy than "
    "asynchronous training, as published, is neither shown nor refuted: the runs are short, the rate that is best for "
    "`sync` is near the edge of stability, and at a stable one seeds differ by more than the methods. One worker "
    "alone and workers that never communicate were not run. The raw runs are not in the repository."
)
ABOUT_SEEDS = (
    "The rate is that which was best with seed 0. For `sync` it is near the largest that is stable. At the rate of "
    "the first rows, where all seeds are stable, `sync` is ahead of asynchronous training by less than seeds differ."
)
ASYNC = "parameter-server(mode=async, average=0.9995)"  # an average over as many gradients as in `sync`


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


def sync(backups: int) -> str:
    """Chen et al.'s method and rule: the learning rate is that of one gradient times their number."""
    return f"parameter-server(mode=sync(backups={backups}, rate=linear), average=0.95)"


def trained(spec: str, learning_rate: float, seed: int = 0) -> tuple[str, list[float], float]:
    """Training with these times: a table's row, and its times to the losses and final test accuracy."""
    trace_s = arrival_times(500, MACHINES, seed=2 + seed).flatten().tolist()
    run = pl.simulate_task(
        pl.TrainConfig(
            task=TASK, algorithm=spec, epochs=EPOCHS, batch_size=BATCH_SIZE, learning_rate=learning_rate, seed=seed
        ),
        cluster=Cluster(workers=MACHINES, compute_s=Recorded(times_s=tuple(trace_s))),
    )
    curve, result = loss_curve(run.records), run.result
    to_losses_s = []
    for loss in LOSSES:
        reached = np.flatnonzero(curve.average[WINDOW:] <= loss)
        to_losses_s.append(float(curve.time_s[WINDOW + reached[0]]) if len(reached) else float("inf"))
    row = (
        f"| {spec} | {learning_rate:g} | {result['steps']:,} | {result['steps'] / result['wall_s']:.3f} |"
        f" {result['dropped_updates']:,} | {' | '.join(map(_seconds, to_losses_s))} | {100 * result['test_accuracy']:.2f} |"
    )
    print(row, flush=True)
    return row, to_losses_s, 100 * result["test_accuracy"]


def training_lines() -> list[str]:
    """The second part: what training with these times makes of it."""
    lines = [
        "",
        "## Real gradients",
        "",
        f"The same machines train {TASK} for {EPOCHS:g} epochs with batches of {BATCH_SIZE} each: every gradient is computed,"
        f" in simulated time; training loss is the mean over {WINDOW} gradients. The learning rate is one gradient's: `sync`"
        " multiplies it by their number (`rate=linear`, as published), asynchronously each gradient is an update. A server's"
        " sums and answers take time, too (`docs/simulated_traffic.md`), which so small a model hardly feels. Accuracy is,"
        " as published, that of a moving average, here over the last 2,000 gradients or so: the newest parameters' own"
        " varies by several percent from one update to the next at these rates.",
        "",
        "| algorithm | learning rate | updates | updates per s | gradients dropped | "
        + " | ".join(f"s to loss {loss:g}" for loss in LOSSES)
        + " | test accuracy, % |",
        "|---" * (6 + len(LOSSES)) + "|",
    ]
    by_backups = {b: trained(sync(b), SYNC_RATE) for b in TRAINED_BACKUPS}
    by_rate = {rate: trained(ASYNC, rate) for rate in ASYNC_RATES}
    lines += [row for row, *_ in (*by_backups.values(), *by_rate.values())]
    best = min(by_backups, key=lambda b: by_backups[b][1][DECIDING])
    others = {rate: trained(sync(best), rate) for rate in OTHER_SYNC_RATES}
    lines += [row for row, *_ in others.values()]
    others[SYNC_RATE] = by_backups[best]
    soonest_s = min(times_s[DECIDING] for _, times_s, _ in by_rate.values())
    further, rates = [], []
    for spec, by_its_rate in ((sync(best), others), (ASYNC, by_rate)):
        rates.append(max(by_its_rate, key=lambda rate: by_its_rate[rate][2]))
        seeds = [trained(spec, rates[-1], seed)[2] for seed in FURTHER_SEEDS]
        further.append([by_its_rate[rates[-1]][2], *seeds])
    with_backups, without = (
        f"{', '.join(f'{one:.2f}' for one in seeds)} (median {sorted(seeds)[len(seeds) // 2]:.2f})" for seeds in further
    )
    lines += [
        "",
        f"Soonest at loss {LOSSES[DECIDING]:g}: b = {best}, after {_seconds(by_backups[best][1][DECIDING])} s; without"
        f" backups {_seconds(by_backups[0][1][DECIDING])} s, asynchronously at the best rate for it {_seconds(soonest_s)} s."
        f" Final test accuracy with seeds 0, 1, 2, each at the rate that is best for it: {with_backups} % with b = {best} at"
        f" {rates[0]:g}, {without} % asynchronously at {rates[1]:g}.",
        "",
        ABOUT_SEEDS,
        "",
        "A worker that is held up for long is missing in many steps, and uses a backup up in each: so steps with few backups"
        " take longer here than above, where all workers begin each step together.",
    ]
    return lines


def _seconds(time_s: float) -> str:
    return f"{time_s:,.0f}" if time_s < float("inf") else "never"


def main() -> None:
    """Print the tables as markdown."""
    times_s = arrival_times(STEPS, MACHINES, seed=0)
    in_order = np.sort(times_s, axis=1)
    choice = plan_arrivals(times_s)
    plain = plan_arrivals(times_s, half_efficient=float("inf"))
    lines = ["# Backup workers of 100 machines, simulated", "", FIRST, ""]
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
                f"| {row.backups}{mark} | {row.step_s.value:.3f} | {row.time_relative.value:.3f} |"
                f" {row.throughput_relative:.2f} | {other.time_relative.value:.3f} |"
            )
    near = choice.within(0.02)
    chosen = choices_online(20)
    at = {row.backups: row.time_relative.value for row in choice.rows}
    worst = max(at[b] for b in chosen) / choice.best.time_relative.value - 1
    lines += [
        "",
        f"Within 2 % of the best: b = {near[0]} to {near[-1]}. `backups=auto` after 200 steps of 20 independent runs chose b ="
        f" {min(chosen)} to {max(chosen)}, at worst {worst:.1%} above the best.",
    ]
    show([*lines, *training_lines()], __file__)


if __name__ == "__main__":
    main()
