"""Does a convergence model from short runs predict runs that were never made, and does its advice find the best m?

    python benchmarks/fidelity/convergence_model.py

Three methods on scikit-learn's digits, even against odd, computed exactly with m workers in one process: SGD and SGD with
local updates on logistic regression, and CoCoA+ on a support vector machine, as Hemingway's paper has them. The optimum is
known from a solver. What a round takes comes from `paceline simulate`, timing only. Takes about half a minute on one core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
from experiment_design import candidates, design
from scipy.optimize import minimize
from sklearn.datasets import load_digits

import paceline as pl
from paceline.planner.convergence_model import ConvergenceModel, Curve
from paceline.planner.system_model import SystemModel
from paceline.planner.time_to_loss import TimeToLoss
from paceline.simulator import Cluster

SAMPLES, BATCH, PENALTY = 1536, 8, 1e-3
RUN = (1, 2, 4, 8, 16, 32)  # numbers of workers with a short run; all others are predicted
ALL = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # that divide the samples
SEEDS = (0, 1, 2)
GAPS = (0.03, 0.01, 0.003, 0.001)
STEP_S, LATENCY_S = 2e-3, 5e-4  # of a batch on one worker; of a message
ROUNDS, BUDGET = 5, 12.0  # of a timing; of the trials, in short ones of one worker


def data() -> tuple[np.ndarray, np.ndarray]:
    """Samples (SAMPLES, 65) of length at most 1, shuffled, and labels -1 and 1."""
    X, digit = load_digits(return_X_y=True)
    X = np.hstack([X / 16, np.ones((len(X), 1))])
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    order = np.random.default_rng(0).permutation(len(X))[:SAMPLES]
    return np.ascontiguousarray(X[order]), np.where(digit[order] % 2 == 0, 1.0, -1.0)


@numba.njit
def logistic(X, y, w):
    """Mean loss with an L2 penalty."""
    total = 0.0
    for j in range(len(y)):
        total += np.log1p(np.exp(-y[j] * (X[j] @ w)))
    return total / len(y) + PENALTY / 2 * (w @ w)


@numba.njit
def local_sgd(X, y, m, steps, rounds, rate, seed):
    """Each worker makes so many steps on its own part, then models are averaged; one step is synchronous SGD."""
    np.random.seed(seed)
    n, d = X.shape
    part = n // m
    w, losses = np.zeros(d), np.empty(rounds)
    for r in range(rounds):
        mean = np.zeros(d)
        for k in range(m):
            own = w.copy()
            for _ in range(steps):
                g = PENALTY * own
                for _ in range(BATCH):
                    j = k * part + np.random.randint(part)
                    g -= y[j] * X[j] / (1 + np.exp(y[j] * (X[j] @ own))) / BATCH
                own -= rate * g
            mean += own / m
        w = mean
        losses[r] = logistic(X, y, w)
    return losses


@numba.njit
def cocoa_plus(X, y, m, rounds, seed):
    """A pass of coordinate ascent over each worker's part of the dual per round, with sigma' = m; updates are added.

    Returns losses (rounds,), and the dual's last value, which is below the optimum.
    """
    np.random.seed(seed)
    n, d = X.shape
    part = n // m
    alpha, w, losses = np.zeros(n), np.zeros(d), np.empty(rounds)
    for r in range(rounds):
        together = np.zeros(d)
        for k in range(m):
            own = np.zeros(d)  # sigma' times what this worker has changed
            for _ in range(part):
                j = k * part + np.random.randint(part)
                room = 1 - y[j] * (X[j] @ (w + m * own))
                new = min(1.0, max(0.0, alpha[j] + room * PENALTY * n / (m * (X[j] @ X[j]))))
                own += (new - alpha[j]) * y[j] * X[j] / (PENALTY * n)
                alpha[j] = new
            together += own
        w = w + together
        hinge = 0.0
        for j in range(n):
            hinge += max(0.0, 1 - y[j] * (X[j] @ w))
        losses[r] = hinge / n + PENALTY / 2 * (w @ w)
    return losses, alpha.sum() / n - PENALTY / 2 * (w @ w)


@dataclass(frozen=True)
class Method:
    """What is run, and for how long.

    Args:
        name: for the tables.
        losses: after each of so many rounds, with m workers and a seed.
        steps: of one worker per round.
        spec: what the simulator's clock runs.
        optimum: P*.
        short: rounds of the runs that the model sees.
        long: rounds of those that it is judged by.
    """

    name: str
    losses: Callable[[int, int, int], np.ndarray]
    steps: Callable[[int], int]
    spec: Callable[[int], str]
    optimum: float
    short: int
    long: int


def methods() -> list[Method]:
    """The three, with their optima from a solver and from a bound."""
    X, y = data()
    solved = minimize(lambda w: logistic(X, y, w), np.zeros(X.shape[1]), method="L-BFGS-B", options={"gtol": 1e-8})
    _, bound = cocoa_plus(X, y, 1, 3000, 0)
    one_pass = SAMPLES // BATCH
    return [
        Method(
            "SGD, synchronous",
            lambda m, rounds, seed: local_sgd(X, y, m, 1, rounds, 4.0, seed),
            lambda m: 1,
            lambda steps: "all-reduce",
            solved.fun,
            short=150,
            long=600,
        ),
        Method(
            "SGD, local updates",
            lambda m, rounds, seed: local_sgd(X, y, m, one_pass // m, rounds, 4.0, seed),
            lambda m: one_pass // m,
            lambda steps: f"local-sgd(period={steps})",
            solved.fun,
            short=25,
            long=100,
        ),
        Method(
            "SVM, CoCoA+",
            lambda m, rounds, seed: cocoa_plus(X, y, m, rounds, seed)[0],
            lambda m: one_pass // m,
            lambda steps: f"local-sgd(period={steps})",  # as long: a pass over the part, then one exchange
            bound,
            short=25,
            long=100,
        ),
    ]


def round_s(method: Method, m: int, size: float = 1.0) -> float:
    """Seconds of a round by `paceline simulate`; a size below 1 is a round over so much of each worker's part."""
    full = method.steps(m)
    steps = max(1, round(full * size))
    compute_s = STEP_S * size * full / steps  # a part that is no whole number of batches
    cluster = Cluster(workers=m, compute_s=compute_s, latency_s=LATENCY_S)
    config = pl.TrainConfig(algorithm=method.spec(steps), steps=ROUNDS * steps)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=65)
    return run.result["wall_s"] / ROUNDS


@dataclass(frozen=True)
class Target:
    """How good the advice for one target was.

    Args:
        best: number of workers.
        regret: time with the advised number over the best time, minus 1.
        inside: whether nothing was extrapolated.
        held: whether the advised number's true time lies in its interval.
    """

    best: int
    regret: float
    inside: bool
    held: bool


def judged(method: Method) -> tuple[str, list[str], list[Target]]:
    """A row of the first table, rows of the second, and what these come to."""
    grid = [one for one in candidates(max(RUN), (0.25, 0.5, 1.0)) if one.workers in RUN]
    trials = design(grid, BUDGET).trials
    times = [round_s(method, one.workers, one.size) for one in trials]
    workers, sizes = [one.workers for one in trials], [one.size for one in trials]
    system = SystemModel.fit(workers, times, sizes, relative=True)
    true_s = {m: round_s(method, m) for m in ALL}
    system_error = max(abs(system.predict(m).value / true_s[m] - 1) for m in ALL)

    rounds = np.arange(1.0, method.short + 1)
    curves = [
        Curve(workers=m, iterations=rounds, losses=method.losses(m, method.short, seed)) for m in RUN for seed in SEEDS
    ]
    model = ConvergenceModel.fit(curves, optimum=method.optimum)
    runs = {m: [np.minimum.accumulate(method.losses(m, method.long, 100 + s)) for s in range(9)] for m in ALL}
    shown = {}
    for m in ALL:
        g = model.log_suboptimality(rounds, m)
        truth = np.log(np.array(runs[m])[:, : method.short] - method.optimum)
        shown[m] = math.sqrt(float(np.mean((truth - g) ** 2))) / math.log(10)
    left_out = {m: error / math.log(10) for m, error in model.leave_one_out.items()}
    cells = [f"{left_out[m]:.2f}" if m in left_out else f"({shown[m]:.2f})" for m in ALL]
    forward = model.forward / math.log(10)
    errors = f"| {method.name} | " + " | ".join(cells) + f" | {forward:.2f} | {100 * system_error:.1f} % |"

    h = TimeToLoss(step_s=system.predict, convergence=model)
    rows, found = [], []
    for gap in GAPS:
        loss = method.optimum + gap
        reached = {m: float(np.median([first(run, loss) for run in runs[m]])) * true_s[m] for m in ALL}
        best = min(reached, key=lambda m: reached[m])
        expected = {m: said for m in ALL if (said := h.time_to(loss, m)) is not None}
        advised = min(expected, key=lambda m: expected[m].value)
        regret, said = reached[advised] / reached[best] - 1, expected[advised]
        held = said.low <= reached[advised] <= said.high
        found.append(Target(best, regret, not said.extrapolated, held))
        spans = [f"{reached[m]:.2f} s" for m in (1, best, advised, max(ALL))]
        rows.append(
            f"| {method.name} | {gap:g} | {best} | **{advised}** | {cost(regret).partition(':')[0]} | "
            + " | ".join(spans)
            + f" | {said.value:.2f} s ({said.low:.2f} to {said.high:.2f}) | {'outside' if said.extrapolated else 'inside'} |"
        )
    return errors, rows, found


def first(losses: np.ndarray, loss: float) -> float:
    """The round after which a loss is reached, infinity if it is not."""
    below = np.flatnonzero(losses <= loss)
    return float(below[0]) + 1 if below.size else math.inf


def main() -> None:
    """Print the tables and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    out = parser.parse_args().out
    errors, advice, found = [], [], {}
    for method in methods():
        of_errors, of_advice, found[method.name] = judged(method)
        errors.append(of_errors)
        advice += of_advice
        print(of_errors, *of_advice, sep="\n", flush=True)
    heads = " | ".join(f"m = {m}" for m in ALL)
    text = [
        "# Convergence model and advice on convex problems",
        "",
        "Printed by `python benchmarks/fidelity/convergence_model.py`.",
        "",
        f"Digits, even against odd, {SAMPLES} samples, L2 penalty {PENALTY:g}. The convergence model has seen {len(SEEDS)}"
        f" short runs each with {', '.join(map(str, RUN))} workers, a quarter as long as those that judge it (9 seeds of their"
        " own, medians). The system model has seen the times of designed trials on the same numbers of workers;"
        f" {1e3 * STEP_S:g} ms per batch of {BATCH}, messages of {1e3 * LATENCY_S:g} ms, simulated.",
        "",
        "Root mean square error of log10 suboptimality: of a number of workers that was left out of the fit; in brackets of"
        " one that was never run. Then that of the last 40 % of rounds from the first 60 %, and f(m)'s largest error.",
        "",
        f"| | {heads} | forward | f(m) |",
        "|---" * (len(ALL) + 3) + "|",
        *errors,
        "",
        "Time until a given suboptimality, and the number of workers advised from the short runs:",
        "",
        "| | P - P* | best m | advised m | than the best | m = 1 | best | advised | m = 32 | predicted (90 %) | |",
        "|---" * 11 + "|",
        *advice,
        "",
        *verdict(found),
        "",
        "f(m) of synchronous SGD is off because a ring of m workers sends 2 (m - 1) messages one after the other: that is a"
        " fixed cost below zero, and theta >= 0 has none. A constant learning rate's noise floor, higher with fewer workers,"
        " lies beyond the short runs of synchronous SGD: what is predicted there is said to be extrapolated, and must be run.",
    ]
    out.write_text("\n".join([*text, ""]), encoding="utf-8")


def verdict(found: dict[str, list[Target]]) -> list[str]:
    """In words, from the figures."""
    lines = []
    for name, targets in found.items():
        best = [one.best for one in targets]
        interior = [m for m in best if 1 < m < max(ALL)]
        depends = "depends on the target" if len(set(best)) > 1 else "is the same for all targets"
        line = f"- {name}: the best m is interior for {len(interior)} of {len(best)} targets and {depends}."
        for inside, where in ((True, "Inside of what was run"), (False, "Beyond it, as the advice itself says,")):
            if regrets := [one.regret for one in targets if one.inside is inside]:
                line += f" {where} the advised m is at most {cost(max(regrets))}."
        lines.append(line)
    seen = [one.held for targets in found.values() for one in targets if one.inside]
    lines.append(f"- Intervals of 90 % hold {sum(seen)} of {len(seen)} true times, where nothing was extrapolated.")
    return lines


def cost(regret: float) -> str:
    """Of an advised m over the best."""
    return f"{100 * regret:.0f} % slower" if math.isfinite(regret) else "infinitely slower: the target is not reached"


if __name__ == "__main__":
    main()
