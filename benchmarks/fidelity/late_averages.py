"""What late averages drop and what they hide: DaSGD's effective speed against the law, and throughput from 4 to 256 workers.

python benchmarks/fidelity/late_averages.py [--write]
"""

from __future__ import annotations

import warnings

import torch
from page import show
from torch import nn

import paceline as pl
from paceline.errors import AlgorithmWarning

GRID = [(4, 1, 0.25), (4, 1, 0.0), (4, 3, 0.25), (4, 4, 0.25), (8, 2, 0.5), (8, 6, 0.25), (16, 8, 0.5), (16, 15, 0.0)]
PERIODS = 10
TOLERANCE = 1e-9
WORKERS = (4, 16, 64, 256)
MOST_ALL_REDUCE = 16  # its hundred buckets a step take minutes to simulate with more
DELAYED = "da-sgd(delay=2)"
METHODS = ("all-reduce", "local-sgd(period=4)", "da-sgd(delay=0)", DELAYED)
STEPS, STEP_S, PARAMETERS = 12, 0.1, 25_000_000
MACHINES = {"bandwidth_bytes_per_s": 1.25e9, "latency_s": 2e-5, "core_bytes_per_s": 900e9}
LINEAR = 0.95


class Constant(nn.Module):
    """A model whose gradient is -1, wherever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """-w x."""
        return -(self.w * x).sum()


def reached(algorithm: pl.Algorithm, steps: int) -> float:
    """The workers' mean after so many steps of length 1 of each."""
    final = []

    def loop() -> None:
        model = Constant()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.ones(1, dtype=torch.float64)] * (2 * steps)):
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
        final.append(model.w.item())

    pl.simulate(loop, workers=2, algorithm=algorithm)
    return final[0]


def speed(period: int, delay: int, local_weight: float, **arguments: object) -> float:
    """Progress per step, from one merge to the tenth after it."""
    algorithm = pl.DaSGD(period=period, delay=delay, local_weight=local_weight, compensate=False, **arguments)  # type: ignore[arg-type]
    begin = period + delay
    return (reached(algorithm, begin + PERIODS * period) - reached(algorithm, begin)) / (PERIODS * period)


def law() -> list[str]:
    """The table of the grid; its controls are another merge, and the law without the worker's own weight."""
    lines = [
        "| period | delay | local weight | measured | law | `corrected` (control) | law without weight (control) |"
    ]
    lines.append("|---" * 7 + "|")
    for period, delay, weight in GRID:
        found, other = speed(period, delay, weight), speed(period, delay, weight, merge="corrected")
        expected, without = 1 - (1 - weight) * delay / period, 1 - delay / period
        assert abs(found - expected) < TOLERANCE, (period, delay, weight, found)
        assert abs(other - 1.0) < TOLERANCE, "the corrected merge drops nothing"
        assert abs(other - expected) > TOLERANCE, "the control follows the law"
        assert weight == 0 or abs(found - without) > TOLERANCE, "the control follows the law"
        lines.append(f"| {period} | {delay} | {weight} | {found:.4f} | {expected:.4f} | {other:.4f} | {without:.4f} |")
    return lines


def samples_per_s(algorithm: str, workers: int) -> float:
    """Simulated throughput of a model of 100 MB over links of 10 Gbit/s."""
    cluster = pl.Cluster(workers=workers, compute_s=STEP_S, **MACHINES)
    config = pl.TrainConfig(task="digits-mlp", algorithm=algorithm, workers=workers, steps=STEPS * workers)
    if algorithm == "all-reduce":
        config = pl.TrainConfig(task="digits-mlp", algorithm=algorithm, workers=workers, steps=4)  # all alike
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=PARAMETERS)
    return run.result["samples"] / run.result["wall_s"]


def scale_up() -> list[str]:
    """Throughput as a share of that of as many workers that do not communicate."""
    lines = ["| workers | " + " | ".join(f"`{one}`" for one in METHODS) + " |", "|---" * (1 + len(METHODS)) + "|"]
    for workers in WORKERS:
        alone = samples_per_s("local-sgd(period=1000000)", workers)
        tried = [one for one in METHODS if one != "all-reduce" or workers <= MOST_ALL_REDUCE]
        shares = {one: samples_per_s(one, workers) / alone for one in tried}
        assert shares[DELAYED] > LINEAR, (workers, shares)
        controls = [share for one, share in shares.items() if one != DELAYED]
        assert max(controls) < LINEAR, ("a control scales linearly, too", workers, shares)
        lines.append(
            f"| {workers} | " + " | ".join(f"{shares[one]:.3f}" if one in shares else "-" for one in METHODS) + " |"
        )
    return lines


def main() -> None:
    """Print the page."""
    warnings.simplefilter("ignore", AlgorithmWarning)
    lines = [
        "# What late averages drop, and what they hide",
        "",
        "Printed by `python benchmarks/fidelity/late_averages.py`.",
    ]
    lines += [
        "",
        "## Effective speed",
        "",
        "Two simulated workers whose gradient is 1 everywhere, in float64: progress per step from one merge to the tenth after"
        " it, without compensation of the rate. The law is 1 - (1 - local_weight) delay / period.",
        "",
        *law(),
        "",
        "## Throughput",
        "",
        f"Simulated, time only: {PARAMETERS * 4 / 1e6:.0f} MB of parameters, {STEP_S} s a step, memory of 900 GB/s, as the"
        " paper's V100 has, and a ring over links of 10 Gbit/s. Samples a second as a share of workers that do not"
        f" communicate: `{DELAYED}` is above {LINEAR} throughout, and each of the others, the controls, below."
        " `da-sgd(delay=0)` merges as the others of its kind do, and waits for it.",
        "",
        *scale_up(),
    ]
    show(lines, __file__)


if __name__ == "__main__":
    main()
