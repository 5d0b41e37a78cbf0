"""Does AD-PSGD's mean squared gradient fall as 1 / sqrt(K), whatever the number of workers? Real gradients, simulated workers.

    python benchmarks/fidelity/convergence_rate.py

K counts the gradients of all n workers together. As the theorem prescribes (Lian et al., ICML 2018, arXiv:1710.06952,
corollary 2), the learning rate is proportional to n / sqrt(K): the mean of the models then moves by C / sqrt(K) times a
gradient. More workers begin at larger K, where their learning rate is as small: the theorem holds for K large enough. The
problem is `egg_carton.py`. Takes about six minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import numpy as np
from egg_carton import DIMENSIONS, NOISE
from scipy.integrate import trapezoid

import paceline as pl
from paceline.simulator import Cluster, Normal

AD_PSGD, ALONE = "ad-psgd(topology=bipartite-exponential)", "local-sgd(period=1000000)"
RATE = 0.5  # C
POWERS = {4: range(11, 17), 16: range(11, 17), 64: range(14, 18)}  # of two: K, by number of workers
LENGTHS = tuple(2**power for power in range(11, 18))
RUNS = [(AD_PSGD, n) for n in POWERS] + [(ALONE, 16)]
NAMES = {AD_PSGD: "AD-PSGD", ALONE: "no communication (control)"}
SUM_OF_CURVATURES = DIMENSIONS * 1.0


def squared_gradient(algorithm: str, n: int, length: int) -> float:
    """(1 / K) sum over k of ||grad f(mean of the models after k gradients)||^2."""
    epoch = max(1, round(math.sqrt(length) / 4))  # the way down takes some sqrt(K) gradients
    os.environ["EGG_CARTON_EPOCH"] = str(epoch)
    config = pl.TrainConfig(
        task=f"{Path(__file__).parent / 'egg_carton.py'}:egg_carton",
        algorithm=algorithm,
        workers=n,
        epochs=length / epoch,
        learning_rate=RATE * n / math.sqrt(length),
        seed=1,
    )
    cluster = Cluster(workers=n, compute_s=Normal(average_s=0.01, deviation_s=0.001))
    run = pl.simulate_task(config, cluster=cluster)
    points = {one["samples"]: one["test_loss"] for one in run.evaluations}
    samples, values = [0, *points], [0.0, *points.values()]  # the gradient at the maximum is zero
    return float(trapezoid(values, samples) / samples[-1])


def expected(length: int) -> float:
    """For small steps: what f loses, 2 sum l_j, and what the noise gives back, are worth so much.

    f's expectation moves by -s ||grad f||^2 + (s^2 / 2) sigma^2 sum_j l_j cos x_j per gradient, s = C / sqrt K, and cos x_j is
    1 in the valleys, where nearly all of the time is spent.
    """
    return SUM_OF_CURVATURES * (2 / RATE + RATE * NOISE**2 / 2) / math.sqrt(length)


def slope(lengths: list[int], values: list[float]) -> tuple[float, float]:
    """Of log(value) over log(K), by least squares; and its standard error."""
    x, y = np.log(lengths), np.log(values)
    x = x - x.mean()
    fitted = float(x @ y / (x @ x))
    left = y - y.mean() - fitted * x
    return fitted, math.sqrt(float(left @ left) / (len(x) - 2) / float(x @ x))


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    out = parser.parse_args().out
    columns, slopes = [], []
    for algorithm, n in RUNS:
        found = {}
        for length in (2**power for power in POWERS[n]):
            found[length] = squared_gradient(algorithm, n, length)
            print(NAMES[algorithm], n, length, f"{found[length]:.4g}", f"{expected(length):.4g}", flush=True)
        columns.append(found)
        slopes.append(slope(list(found), list(found.values())))
    heads = [f"{NAMES[algorithm]}, n = {n}" for algorithm, n in RUNS]
    lines = ["| K | " + " | ".join(heads) + " | small steps |", "|---" * (len(heads) + 2) + "|"]
    for length in LENGTHS:
        cells = [f"{found[length]:.3f}" if length in found else "-" for found in columns]
        lines.append(f"| {length:,} | " + " | ".join(cells) + f" | {expected(length):.3f} |")
    lines.append(
        "| slope | " + " | ".join(f"**{value:.3f}** +- {error:.3f}" for value, error in slopes) + " | -0.500 |"
    )
    last = [math.log2(list(found.values())[-1] / list(found.values())[-2]) for found in columns]
    lines.append("| of the last doubling | " + " | ".join(f"{value:.3f}" for value in last) + " | -0.500 |")
    fails = abs(slopes[-1][0] + 0.5) > 5 * slopes[-1][1]
    text = [
        "# AD-PSGD's rate of convergence, simulated",
        "",
        "Printed by `python benchmarks/fidelity/convergence_rate.py`.",
        "",
        "Mean of ||grad f||^2 at the mean of the models over a run of K gradients in total, learning rate"
        f" {RATE} n / sqrt(K), on a problem of {DIMENSIONS} dimensions whose optimum is known (`egg_carton.py`). The theorem"
        " says: proportional to 1 / sqrt(K), a slope of -0.5, and the same for every n (a linear speed-up). Last column: what"
        " small steps would give, by hand. Slopes with one standard error; - where the step is too long for the theorem.",
        "",
        *lines,
        "",
        "With many workers and few gradients there is more than that: workers are apart and gradients old, which costs terms"
        " of higher order in n / sqrt(K); the theorem asks for K above a polynomial in n. What is above small steps falls much"
        " faster than 1 / sqrt(K), and steepens the slope fitted over all K; the last doubling has the least of it.",
        "",
        f"The control {'fails, as it must' if fails else 'DID NOT FAIL: these figures show nothing'}: without communication"
        " the workers fall into different valleys, and their mean stays on a slope however many gradients there are.",
    ]
    out.write_text("\n".join([*text, ""]), encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
