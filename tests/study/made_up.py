"""Tables of studies that never took place: seeded, with planted ratios, diverged and stopped runs."""

import itertools
import json
import math

import numpy as np
import pandas as pd

METHODS = {"locked(kind=mutex)": 1.0, "locked(kind=rwlock)": 1.08, "hogwild": 1.25, "leashed(persistence=1)": 1.4}
FRACTIONS = ("75", "50", "25", "10", "5", "2.5")


def make_table(
    methods=METHODS, workers=(1, 2, 4), batch_sizes=(16, 64, 512), seeds=5, *, noise=0.06, limit_s=60.0, timing_only=False,
    learning_rates=(0.1,),
):  # fmt: skip
    """One row per trial: `methods` gives how many times sooner each is at the largest number of workers."""
    random = np.random.default_rng(7)
    rows = []
    design = itertools.product(methods, workers, batch_sizes, learning_rates, range(seeds))
    for number, (method, count, batch, rate, seed) in enumerate(design):
        gain = methods[method] ** (1.0 if count == max(workers) else 0.3 if count > 1 else -0.15)
        step_s = (0.0004 + 0.00002 * batch) / (count**0.85 * gain) * random.lognormal(0, noise / 2)
        mean_staleness = (count - 1) * (0.6 + 8 / batch) * (1.5 if method == "hogwild" else 1.0)
        staleness = random.poisson(mean_staleness, 400)
        difficulty = np.random.default_rng(seed).lognormal(0, 0.15)
        need = 900 * difficulty / (batch**0.4) * (1 + 0.12 * mean_staleness * rate / 0.1) * random.lognormal(0, noise)
        diverged = random.random() < min(0.9, 0.002 * mean_staleness * (rate / 0.1) ** 2 * (40 if batch == 16 else 8))
        ends = {one: int(need * (1 - math.log(float(one) / 100)) ** 1.7) for one in FRACTIONS}
        last = ends["50"] if diverged else ends["2.5"]
        steps = int(min(last, limit_s / step_s))
        reached = {one: steps >= at for one, at in ends.items()}
        outcome = "diverged" if diverged else "converged" if steps >= ends["2.5"] else "stopped"
        values, counts = np.unique(staleness, return_counts=True)
        row = {
            "trial": f"{number:012x}", "number": number, "factor.algorithm": method, "factor.workers": count,
            "factor.batch_size": batch, "factor.learning_rate": rate, "factor.seed": seed, "outcome": outcome,
            "reason": "the loss became non-finite" if diverged else "",
            "failed_step": float(steps) if diverged else math.nan, "wall_s": steps * step_s, "steps": steps,
            "samples": steps * batch, "samples_per_s": batch / step_s, "initial_loss": 2.3,
            "train_loss": math.nan if timing_only else 0.06, "test_loss": math.nan, "test_accuracy": math.nan,
            "staleness_mean": float(staleness.mean()), "staleness_max": int(staleness.max()),
            "staleness_histogram": json.dumps(dict(zip(map(str, values.tolist()), counts.tolist(), strict=True))),
            "waiting_share": 0.02 * count * (3 if method.startswith("locked") else 1) * random.uniform(0.8, 1.2),
            "compute_share": 0.7, "apply_share": 0.1, "environment.paceline": "0.1.0", "environment.torch": "2.13.0",
        }  # fmt: skip
        for one, at in ends.items():
            row[f"time_to_{one}_s"] = at * step_s if reached[one] and not timing_only else math.nan
            row[f"steps_to_{one}"] = at if reached[one] and not timing_only else math.nan
        rows.append(row)
    return pd.DataFrame(rows)
