"""Do late gradients need smaller rates? AdaptiveRevision and the AdaGrads that ignore delay, each at its best rate.

    python benchmarks/fidelity/adaptive_revision.py --write

Online logistic regression on sparse features whose frequencies follow a power law; every gradient is applied m updates late.
All rates of a grid, and all seeds, are trained side by side in one long vector: every rule here is linear in its rate, so a
part with rate alpha is the vector y = x / alpha trained with rate 1.
"""

from __future__ import annotations

import numpy as np
import torch
from page import show

from paceline.algorithms.server.adagrad import AsyncAdagrad
from paceline.algorithms.server.adaptive_revision import AdaptiveRevision
from paceline.algorithms.server.apply import SGD, ApplyRule
from paceline.algorithms.server.delay import ConstantDelay
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.update import UpdateInfo

RULES: dict[str, ApplyRule] = {
    "AdaptiveRevision": AdaptiveRevision(),
    "AsyncAda-GD": AsyncAdagrad(),
    "AsyncAda-DA": AsyncAdagrad(form="dual-averaging"),
    "async SGD": SGD(),
}
DELAYS = (0, 10, 100, 1000)
ALPHAS = [0.000625 * 2**power for power in range(13)]  # 0.000625 to 2.56
SEEDS, STEPS, FEATURES = 8, 20_000, 200
FIXED_ALPHA = 0.32


def problem(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples (steps, features), each feature 1 with its own frequency, and labels (steps,), +1 or -1, of a noisy line."""
    draws = np.random.default_rng(seed)
    frequency = np.minimum(0.5, 4.0 / np.arange(1, FEATURES + 1))
    samples = (draws.random((STEPS, FEATURES)) < frequency).astype(np.float64)
    weights = draws.normal(0.0, 1.5, FEATURES)
    probability = 1 / (1 + np.exp(-samples @ weights))
    return samples, np.where(draws.random(STEPS) < probability, 1.0, -1.0)


def mean_losses(rule: ApplyRule, delay: int) -> np.ndarray:
    """Mean loss (seeds, alphas) of predicting each sample before learning from it."""
    samples, labels = (
        torch.tensor(np.stack(part), dtype=torch.float32) for part in zip(*map(problem, range(SEEDS)), strict=True)
    )
    alphas = torch.tensor(ALPHAS)
    y = torch.zeros(SEEDS, len(ALPHAS), FEATURES)
    applier = Delayed(delay=ConstantDelay(updates_late=delay), rule=rule).start(y.numel(), y.dtype)
    total = torch.zeros(SEEDS, len(ALPHAS), dtype=torch.float64)
    for step in range(STEPS):
        sample, label = samples[:, step], labels[:, step, None]
        margin = label * torch.einsum("saf,sf->sa", y, sample) * alphas
        total += torch.nn.functional.softplus(-margin)
        gradient = (-label * torch.sigmoid(-margin))[:, :, None] * sample[:, None, :]
        numbers = {"worker_id": 0, "sequence": step, "step": step, "version_read": step, "version": step}
        info = UpdateInfo(**numbers, num_samples=1, echo=applier.read(0, step))
        applier.apply(y.view(-1), gradient.view(-1), info, 1.0)
    return (total / STEPS).numpy()


def main() -> None:
    """Print the table as markdown."""
    torch.set_num_threads(1)
    losses = {(name, delay): mean_losses(rule, delay) for delay in DELAYS for name, rule in RULES.items()}
    best = {key: int(value.mean(axis=0).argmin()) for key, value in losses.items()}
    lines = ["# Late gradients, at the best rate of each rule", ""]
    lines += ["Printed by `python benchmarks/fidelity/adaptive_revision.py --write`.", ""]
    grid = f"{ALPHAS[0]:g}, {ALPHAS[1]:g}, {ALPHAS[2]:g}, ... {ALPHAS[-1]:g}"
    lines += [
        f"Mean logistic loss of {STEPS:,} online predictions, {FEATURES} sparse features, mean of {SEEDS} problems; in"
        f" brackets the best alpha of {grid}. The last two columns compare problem by problem, mean +- standard error, and on"
        " how many AdaptiveRevision is better: each rule at the alpha in brackets, and at its best alpha for that problem.",
        "",
        "| updates late | " + " | ".join(RULES) + " | AsyncAda-GD minus AdaptiveRevision | own alphas |",
        "|---" * (3 + len(RULES)) + "|",
    ]
    for delay in DELAYS:
        cells = [f"{losses[name, delay].mean(axis=0).min():.4f} ({ALPHAS[best[name, delay]]:g})" for name in RULES]
        ours, theirs = losses["AdaptiveRevision", delay], losses["AsyncAda-GD", delay]
        common = theirs[:, best["AsyncAda-GD", delay]] - ours[:, best["AdaptiveRevision", delay]]
        for gains in (common, theirs.min(axis=1) - ours.min(axis=1)):
            error = gains.std(ddof=1) / SEEDS**0.5
            cells.append(
                f"{gains.mean():+.4f} +- {error:.4f}, {int((gains > 1e-5).sum())} of {SEEDS}"
            )  # 1e-5: rounding
        lines.append(f"| {delay} | " + " | ".join(cells) + " |")
    lines += ["", f"The same at alpha = {FIXED_ALPHA:g}, whatever the delay:", ""]
    lines += ["| updates late | " + " | ".join(RULES) + " |", "|---" * (1 + len(RULES)) + "|"]
    fixed = ALPHAS.index(FIXED_ALPHA)
    for delay in DELAYS:
        lines.append(
            f"| {delay} | " + " | ".join(f"{losses[name, delay][:, fixed].mean():.4f}" for name in RULES) + " |"
        )
    lines += ["", "Loss at a quarter of the best rate, and at four times it, over the loss at the best, 1000 late:", ""]
    lines += ["| | " + " | ".join(RULES) + " |", "|---" * (1 + len(RULES)) + "|"]
    for label, shift in (("a quarter", -2), ("four times", 2)):
        cells = []
        for name in RULES:
            mean, place = losses[name, 1000].mean(axis=0), best[name, 1000]
            inside = 0 <= place + shift < len(ALPHAS)
            cells.append(f"{mean[place + shift] / mean[place]:.2f}" if inside else "-")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    drift = {name: ALPHAS[best[name, 0]] / ALPHAS[best[name, 1000]] for name in RULES}
    lines += [
        "",
        "Best alpha without delay over the one 1000 late: " + ", ".join(f"{n} {d:g}" for n, d in drift.items()) + ".",
    ]
    show(lines, __file__)


if __name__ == "__main__":
    main()
