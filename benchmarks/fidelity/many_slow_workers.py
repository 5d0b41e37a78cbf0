"""14 of 16 workers are 50 times slower: at which learning rates does a parameter server's rule still learn? Simulated.

    python benchmarks/fidelity/many_slow_workers.py

Claimed, as theory: applying gradients however late costs asynchronous SGD its step size, and dropping those that are too late
(Ringmaster ASGD, arXiv:2501.16168) or of earlier parameters (Rennala SGD, arXiv:2305.12387) gives it back.
"""

from __future__ import annotations

import statistics

from page import show

import paceline as pl
from paceline.simulator import Cluster

WORKERS, NUM_SLOW, FACTOR, EPOCHS, SEEDS = 16, 14, 50.0, 15, (0, 1, 2)
RATES = (0.05, 0.1, 0.15, 0.2, 0.3)
MODES = ("async", "ringmaster", "rennala(gradients=16)", "sync(backups=14)")
CONTROL_RATE = 0.2  # where asynchronous SGD must fail
CHANCE = 0.1


def result(mode: str, rate: float, seed: int) -> dict[str, float]:
    """Figures of one run."""
    algorithm = f"parameter-server(mode={mode})"
    config = pl.TrainConfig(algorithm=algorithm, workers=WORKERS, epochs=EPOCHS, learning_rate=rate, seed=seed)
    cluster = Cluster(workers=WORKERS, compute_s=0.01, slowness=tuple((one, FACTOR) for one in range(NUM_SLOW)))
    return pl.simulate_task(config, cluster=cluster).result


def main() -> None:
    """Print the table as markdown."""
    lines = [
        "# Many slow workers: which late gradients should count",
        "",
        "Printed by `python benchmarks/fidelity/many_slow_workers.py`. Test accuracy in % after the same samples"
        f" (`digits-mlp`, {EPOCHS} epochs, {NUM_SLOW} of {WORKERS} workers {FACTOR:.0f} times slower, no momentum): the median"
        f" of {len(SEEDS)} seeds, and the lowest. Chance is {CHANCE:.0%}.",
        "",
        "| mode | "
        + " | ".join(f"rate {rate:g}" for rate in RATES)
        + " | all seeds at 90 % | dropped | virtual time |",
        "|---" * (len(RATES) + 4) + "|",
    ]
    failed = True
    for mode in MODES:
        cells, learned, runs = [], [], []
        for rate in RATES:
            runs = [result(mode, rate, seed) for seed in SEEDS]
            accuracies = [run["test_accuracy"] for run in runs]
            cells.append(f"{100 * statistics.median(accuracies):.1f} ({100 * min(accuracies):.1f})")
            learned += [f"{rate:g}"] * (min(accuracies) >= 0.9)
            if mode == "async" and rate == CONTROL_RATE:
                failed = max(accuracies) < 2 * CHANCE
        dropped = runs[0]["dropped_updates"] / runs[0]["computed_gradients"]
        about = f"{', '.join(learned) or 'none'} | {dropped:.0%} | {runs[0]['wall_s']:.1f} s"
        lines.append(f"| `{mode}` | " + " | ".join(cells) + f" | {about} |")
    lines += [
        "",
        f"The control, `async` at rate {CONTROL_RATE:g}, "
        + ("fails in every seed, as it must." if failed else "DID NOT FAIL: these figures show nothing."),
        "",
        "Gradients that are hundreds of updates late cost `async` its step size; `ringmaster` drops them and keeps it."
        " An update of `rennala` takes 16 gradients, so that it makes a sixteenth of the updates from the same samples,"
        " and pays where the noise of one gradient is what limits the rate. `sync(backups=14)` takes the first two"
        " gradients of every step: that waiting for the fastest is optimal up to logarithms (m-synchronous SGD,"
        " arXiv:2602.03802) is not contradicted here, where all workers draw from the same data.",
    ]
    show(lines, __file__)


if __name__ == "__main__":
    main()
