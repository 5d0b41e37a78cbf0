"""Do gossip's models become as good as all-reduce's? The same samples on 16 and 64 simulated workers, and a control.

    python benchmarks/fidelity/convergence.py

All methods use the same learning rate: in each, the mean of the models moves by the learning rate times the mean gradient.
The control averages nothing. The second table compares a simulated run with a real one of the same four workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import paceline as pl
from paceline.observe.summary import loss_curve

METHODS = {
    "all-reduce": "all-reduce",
    "D-PSGD": "d-psgd(topology=exponential)",
    "AD-PSGD": "ad-psgd(topology=bipartite-exponential)",
    "no communication (control)": "local-sgd(period=1000000)",
}
SIZES, EPOCHS, BATCH_SIZE, LEARNING_RATE = (16, 64), 4, 16, 0.2


def config(algorithm: str, workers: int, epochs: float) -> pl.TrainConfig:
    """One training of mnist-mlp."""
    return pl.TrainConfig(
        task="mnist-mlp",
        algorithm=algorithm,
        workers=workers,
        epochs=epochs,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        seed=1,
    )


def loss_at(run: pl.RunData, samples: list[int]) -> list[float]:
    """The running loss after so many samples."""
    curve = loss_curve(run.records, lockstep=not run.result["gossip"], gossip=run.result["gossip"])
    return np.interp(samples, curve.samples, curve.average).tolist()


def main() -> None:
    """Print the tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "convergence.md")
    out = parser.parse_args().out
    lines = [
        "# Convergence of gossip, simulated",
        "",
        f"mnist-mlp, batch {BATCH_SIZE}, learning rate {LEARNING_RATE}, {EPOCHS} epochs in total."
        " Printed by `python benchmarks/fidelity/convergence.py`.",
        "",
        "| workers | method | test accuracy of the mean | of the worst of 16 workers' own models | consensus distance |",
        "|---|---|---|---|---|",
    ]
    for workers in SIZES:
        for name, spec in METHODS.items():
            result = pl.simulate_task(config(spec, workers, EPOCHS)).result
            worst, distance = result.get("worst_worker_accuracy"), result.get("consensus_distance")
            lines.append(
                f"| {workers} | {name} | {100 * result['test_accuracy']:.2f} % |"
                f" {f'{100 * worst:.2f} %' if worst is not None else '-'} |"
                f" {f'{distance:.3g}' if distance is not None else '-'} |"
            )
            print(lines[-1], flush=True)
    samples = [15_000, 30_000, 60_000, 120_000]
    lines += ["", "Running loss (last 100 batches) of four workers after so many samples:", ""]
    lines += [f"| AD-PSGD | {' | '.join(f'{one:,}' for one in samples)} |", "|---|" + "---|" * len(samples)]
    for name, run in (
        ("simulated", pl.simulate_task(config("ad-psgd", 4, 2))),
        ("real", pl.train(config("ad-psgd", 4, 2))),
    ):
        lines.append(f"| {name} | {' | '.join(f'{one:.3f}' for one in loss_at(run, samples))} |")
        print(lines[-1], flush=True)
    out.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
