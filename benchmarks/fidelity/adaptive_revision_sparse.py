"""The same question as adaptive_revision.py, on sparse rows of real text and of generated clicks.

    python benchmarks/fidelity/adaptive_revision_sparse.py --write

Needs AG News in the folder that PACELINE_DATA names. Online logistic regression; every gradient has the rows of its sample's
features alone, and is applied m updates late, with what the worker had read of the sums of gradients. All rates of a grid are
trained side by side, as the elements of a row: every rule here is linear in its rate.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from page import show
from sklearn.feature_extraction.text import TfidfVectorizer

from paceline.algorithms.server.adagrad import AsyncAdagrad
from paceline.algorithms.server.adaptive_revision import AdaptiveRevision
from paceline.algorithms.server.apply import SGD, ApplyRule
from paceline.algorithms.server.update import UpdateInfo
from paceline.optim.rows import Selection, Table
from paceline.tasks.clicks import USERS, clicks

RULES: dict[str, ApplyRule] = {
    "AdaptiveRevision": AdaptiveRevision(),
    "AsyncAda-GD": AsyncAdagrad(),
    "async SGD": SGD(),
}
DELAYS = (0, 100, 1000)
ALPHAS = [0.01 * 2**power for power in range(12)]  # 0.01 to 20.48
SEEDS, STEPS = 5, 20_000

Sample = tuple[torch.Tensor, torch.Tensor, float]  # rows (n,), values (n, 1), the label, +1 or -1


def ag_news() -> tuple[list[Sample], int]:
    """Articles about the world or sports against those about business or science; TF-IDF of their words."""
    path = next((Path(os.environ["PACELINE_DATA"]) / "ag_news").glob("*train*.csv.gz"))
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    features = TfidfVectorizer(min_df=2).fit_transform([row["content"] for row in rows]).tocsr()
    features.sort_indices()
    labels = [1.0 if int(row["label"]) <= 2 else -1.0 for row in rows]
    samples = []
    for number, label in enumerate(labels):
        own = slice(features.indptr[number], features.indptr[number + 1])
        values = torch.tensor(features.data[own], dtype=torch.float32).unsqueeze(1)
        samples.append((torch.tensor(features.indices[own], dtype=torch.int64), values, label))
    return samples, features.shape[1]


def click_pairs() -> tuple[list[Sample], int]:
    """A weight per user and one per item."""
    (pairs, clicked), _ = (part.tensors for part in clicks().load())
    values = torch.ones(2, 1)
    rows = pairs[: 4 * STEPS] + torch.tensor([0, USERS])
    return [(own, values, 2 * float(label) - 1) for own, label in zip(rows, clicked, strict=False)], 1_000_000


def drawn(samples: list[Sample], seed: int) -> Iterator[Sample]:
    """In a random order, again and again."""
    draws = np.random.default_rng(seed)
    while True:
        for number in draws.permutation(len(samples)):
            yield samples[number]


def mean_losses(rule: ApplyRule, delay: int, samples: list[Sample], features: int, seed: int) -> np.ndarray:
    """Mean loss (alphas,) of predicting each sample before learning from it."""
    alphas = torch.tensor(ALPHAS)
    width = len(ALPHAS)
    y, table = torch.zeros(features * width), Table(0, features * width, width)
    applier = rule.start(y.numel(), y.dtype)
    waiting: deque[tuple[torch.Tensor, torch.Tensor | None, Selection]] = deque()
    total = torch.zeros(width, dtype=torch.float64)
    for step, (rows, values, label) in zip(range(STEPS), drawn(samples, seed), strict=False):
        selection = Selection({table: rows}, 0, len(y))
        margin = label * (selection.take(y).view(-1, width) * values).sum(0) * alphas
        total += torch.nn.functional.softplus(-margin)
        gradient = (-label * torch.sigmoid(-margin)) * values
        read = applier.read(0, step)
        waiting.append((gradient.flatten(), None if read is None else selection.take(read), selection))
        if len(waiting) > delay:
            due, echo, own = waiting.popleft()
            numbers = {"worker_id": 0, "sequence": step, "step": step, "version_read": step, "version": step}
            applier.update(y, due, UpdateInfo(**numbers, num_samples=1, selection=own, echo=echo), 1.0)
    return (total / STEPS).numpy()


def table_of(make: Callable[[], tuple[list[Sample], int]]) -> list[str]:
    """Lines of Markdown for one problem."""
    samples, features = make()
    lines = [
        f"{features:,} features, {np.mean([len(rows) for rows, *_ in samples]):.1f} of them in a sample:",
        "",
        "| updates late | " + " | ".join(RULES) + " | AsyncAda-GD minus AdaptiveRevision |",
        "|---" * (2 + len(RULES)) + "|",
    ]
    for delay in DELAYS:
        losses = {
            name: np.stack([mean_losses(rule, delay, samples, features, seed) for seed in range(SEEDS)])
            for name, rule in RULES.items()
        }
        best = {name: int(own.mean(axis=0).argmin()) for name, own in losses.items()}
        cells = [f"{losses[name].mean(axis=0).min():.4f} ({ALPHAS[best[name]]:g})" for name in RULES]
        ours, theirs = (losses[name][:, best[name]] for name in ("AdaptiveRevision", "AsyncAda-GD"))
        gains = theirs - ours
        error = gains.std(ddof=1) / SEEDS**0.5
        cells.append(f"{gains.mean():+.4f} +- {error:.4f}, {int((gains > 1e-5).sum())} of {SEEDS}")
        lines.append(f"| {delay} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return [*lines, ""]


def main() -> None:
    """Prints the tables as markdown."""
    torch.set_num_threads(1)
    grid = f"{ALPHAS[0]:g}, {ALPHAS[1]:g}, ... {ALPHAS[-1]:g}"
    lines = [
        "# Late gradients of sparse rows, at the best rate of each rule",
        "",
        "Printed by `python benchmarks/fidelity/adaptive_revision_sparse.py --write`.",
        "",
        f"Mean logistic loss of {STEPS:,} online predictions, mean of {SEEDS} orders of the samples; in brackets the best"
        f" alpha of {grid}. The last column compares order by order, mean +- standard error, and on how many"
        " AdaptiveRevision is better.",
        "",
        "AG News, articles about the world or sports against business or science, TF-IDF of their words;",
        *table_of(ag_news),
        "The task clicks, a weight per user and one per item;",
        *table_of(click_pairs),
    ]
    show(lines, __file__)


if __name__ == "__main__":
    main()
