"""One of four real workers ten times as slow: time for the same samples, and how good the worst worker's own model is.

    python benchmarks/slow_worker.py

Every worker's gradient takes a timed sleep besides its computing. Ideal: work flows to whoever is free, P / (P - 1 + 1/f) of
the undisturbed time. The control averages nothing: its workers' own models must be worse.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from paceline.system.machine import machine, versions

HERE = Path(__file__).parent
WORKERS, STEP_S = 4, 0.01
BATCH, SAMPLES = 64, 60_000
ALGORITHMS = {
    "all-reduce": "all-reduce",
    "d-psgd": "d-psgd",
    "ad-psgd": "ad-psgd",
    "no communication (control)": "local-sgd(period=1000000)",
}
ENDS = {"ad-psgd": 2}  # a pair's average is counted by both


def run(algorithm: str, factor: float, epochs: float) -> dict:
    """One training in a program of its own, since workers inherit the variables that it began with; its result."""
    options = {"task": f"{HERE / 'slow_task.py'}:task", "workers": WORKERS, "learning-rate": 0.4, "batch-size": BATCH}
    # In rounds all workers make as many steps; otherwise as many as their speeds allow.
    speeds = [1 / factor if algorithm == "ad-psgd" else 1.0, *[1.0] * (WORKERS - 1)]
    steps = [round(epochs * SAMPLES / BATCH * speed / sum(speeds)) for speed in speeds]
    words = [f"--{name}={value}" for name, value in {**options, "algorithm": algorithm, "epochs": epochs}.items()]
    command = [sys.executable, "-c", "from paceline.cli.app import main; main()", "train", *words, "--json"]
    variables = {**os.environ, "SLOW_FACTOR": str(factor), "SLOW_STEP_S": str(STEP_S)}
    variables["SLOW_STEPS"] = ",".join(map(str, steps))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "slow_worker.md")
    arguments = parser.parse_args()
    ideal = WORKERS / (WORKERS - 1 + 1 / arguments.factor)
    rows = []
    for name, spec in ALGORITHMS.items():
        ratios, results = [], []
        for _ in range(arguments.repetitions):
            even, slowed = run(spec, 1.0, arguments.epochs), run(spec, arguments.factor, arguments.epochs)
            ratios.append(slowed["wall_s"] / even["wall_s"])
            results.append(slowed)
        slowed = sorted(results, key=lambda one: one["worst_worker_accuracy"] or one["test_accuracy"])[
            len(results) // 2
        ]
        worst = slowed["worst_worker_accuracy"]
        ratio = statistics.median(ratios)
        averages = (slowed["averages_per_step"] or 0) / ENDS.get(name, 1)
        rows.append(
            f"| {name} | {ratio:.2f} | {ratio / ideal:.2f} | {100 * slowed['test_accuracy']:.1f} % |"
            f" {f'{100 * worst:.1f} %' if worst is not None else '-'} | {averages:.2f} |"
            f" {100 * slowed['share_of_updates'][0]:.1f} % |"
        )
        print(rows[-1], flush=True)
    about, package = machine(), versions()
    text = [
        f"# One of {WORKERS} real workers {arguments.factor:g} times as slow (mnist-mlp, batch 64, {arguments.epochs} epochs)",
        "",
        f"{about['processor']}, {about['cores']} cores; Python {package['python']}, torch {package['torch']}. Every gradient"
        f" takes {STEP_S * 1e3:g} ms of sleep besides its computing, worker 0's {arguments.factor:g} times that. The learning"
        " rate is 0.4 and falls linearly to 0.02 over the last half of a worker's steps, in every row: at a constant rate the"
        " noise of a worker's own last gradients costs its model most of a point, whoever it averages with. Made by"
        f" `python benchmarks/slow_worker.py --epochs {arguments.epochs} --repetitions {arguments.repetitions}`.",
        "",
        f"Time is that for the same total of samples, times the undisturbed time; an ideal method needs {ideal:.2f}.",
        "",
        "| method | time | of the ideal | accuracy of the mean | of the worst worker's own model |"
        " averages with others per gradient | slow worker's share |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    arguments.out.write_text("\n".join([*text, ""]))


if __name__ == "__main__":
    main()
