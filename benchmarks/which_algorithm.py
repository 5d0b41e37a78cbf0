"""The table of docs/which_algorithm.md: how the algorithms compare on this machine, with one slow worker and without.

    python benchmarks/which_algorithm.py [--repetitions 7]

Every repetition runs every algorithm once, in another order each time; ratios are taken within a repetition. Shown are
medians over the repetitions with 95 % bootstrap intervals of the median. Takes two to three minutes on two cores; let
nothing else run meanwhile. Trains mnist-mlp where PACELINE_DATA has it, else digits-mlp. Prints the table and writes
benchmarks/results/which_algorithm.md, whose table that page repeats.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import paceline as pl
from paceline.system.machine import machine, versions
from paceline.tasks import load_task

ALGORITHMS = ("sequential", "lockstep", "locked", "locked(kind=rwlock)", "hogwild", "leashed")
FRACTION = "0.1"  # of the initial loss
SLOW_S, FAST_S, NUM_BATCHES = (
    0.016,
    0.004,
    240,
)  # gradients of the slow worker and of the others, in the straggler's test
RESULTS = Path(__file__).with_name("results") / "which_algorithm.md"


def sleepy(slow_worker: int | None) -> None:
    """A loop whose gradients take as long as it sleeps, so that three workers fit on any machine."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.ones(4, 8)] * NUM_BATCHES
    with pl.attach(model, optimizer) as worker:
        for x in worker.batches(batches):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            time.sleep(SLOW_S if worker.worker_id == slow_worker else FAST_S)
            optimizer.step()


def throughput(algorithm: str, slow_worker: int | None) -> float:
    """Batches per second of three sleepy workers."""
    result = pl.launch(partial(sleepy, slow_worker), workers=3, algorithm=algorithm).result
    return NUM_BATCHES / result["wall_s"]


def measure(task: str, settings: dict, repetition: int) -> dict[tuple[str, str], float]:
    """One repetition: (algorithm, figure) -> value."""
    found: dict[tuple[str, str], float] = {}
    order = np.random.default_rng(repetition).permutation(len(ALGORITHMS))
    for algorithm in (ALGORITHMS[index] for index in order):
        workers = 1 if algorithm == "sequential" else 2
        config = pl.TrainConfig(task=task, algorithm=algorithm, workers=workers, seed=repetition, **settings)
        result = pl.train(config).result
        found[algorithm, "samples_per_s"] = result["samples_per_s"]
        found[algorithm, "time_s"] = result["time_to_fraction_s"][FRACTION] or float("nan")
        found[algorithm, "accuracy"] = result["test_accuracy"]
        found[algorithm, "staleness"] = result["staleness"]["mean"]
        if algorithm != "sequential":
            found[algorithm, "kept"] = throughput(algorithm, slow_worker=0) / throughput(algorithm, slow_worker=None)
    for algorithm in ALGORITHMS:
        found[algorithm, "speedup"] = found[algorithm, "samples_per_s"] / found["sequential", "samples_per_s"]
    return found


def interval(values: list[float], digits: int, scale: float = 1.0) -> str:
    """`median (low to high)`."""
    samples = np.array(values) * scale
    if not len(samples) or np.isnan(samples).any():
        return "-"
    drawn = np.random.default_rng(0).choice(samples, (10_000, len(samples)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return f"{np.median(samples):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def table(found: dict[tuple[str, str], list[float]]) -> str:
    """The table in Markdown."""
    rows = [
        "| algorithm | samples/s, times one worker's | seconds to 10 % of the initial loss | mean staleness "
        "| test accuracy, % | throughput kept with a straggler, % |",
        "|---|---|---|---|---|---|",
    ]
    for algorithm in ALGORITHMS:
        cells = [
            interval(found[algorithm, "speedup"], 2),
            interval(found[algorithm, "time_s"], 2),
            f"{np.median(found[algorithm, 'staleness']):.2f}",
            f"{100 * np.median(found[algorithm, 'accuracy']):.1f}",
            interval(found[algorithm, "kept"], 0, scale=100),
        ]
        rows.append(f"| `{algorithm}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    """Measures, prints and writes."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--repetitions", type=int, default=7)
    num_repetitions = arguments.parse_args().repetitions
    torch.set_num_threads(1)
    task, settings = "mnist-mlp", {"batch_size": 64, "learning_rate": 0.2, "epochs": 2}
    try:
        load_task(task).load()
    except pl.UsageError:
        task, settings = "digits-mlp", {"epochs": 10}
    measure(task, settings, num_repetitions)  # compiles kernels, starts the fork server, reads files
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for repetition in range(num_repetitions):
        started_s = time.monotonic()
        for key, value in measure(task, settings, repetition).items():
            found[key].append(value)
        print(f"repetition {repetition + 1} of {num_repetitions}: {time.monotonic() - started_s:.0f} s", flush=True)
    host, used = machine(), versions()
    about = ", ".join(f"{key} {value}" for key, value in settings.items()).replace("_", " ")
    text = (
        f"# Which algorithm?\n\n{table(found)}\n\n"
        f"`{task}`, {about}; 2 workers ({ALGORITHMS[0]}: 1). Straggler: one of three workers takes {SLOW_S * 1e3:.0f} ms "
        f"for a gradient, the others {FAST_S * 1e3:.0f} ms; 100 % is the throughput without it, and an ideal method keeps "
        f"{100 * (2 + FAST_S / SLOW_S) / 3:.0f} %. Medians of {num_repetitions} interleaved repetitions, with 95 % "
        f"bootstrap intervals.\n\n{host['processor']}, {host['cores']} cores, {host['memory_gib']} GiB; "
        f"Python {used['python']}, torch {used['torch']}.\n\nMade by `python benchmarks/which_algorithm.py`.\n"
    )
    print(f"\n{text}")
    if num_repetitions < 5:
        print("Not written: that takes at least 5 repetitions.")
        return
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
