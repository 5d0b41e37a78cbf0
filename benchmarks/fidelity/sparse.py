"""The comparison of the Hogwild! paper on data of the same shape: racing against updates that are locked or in turn.

    python benchmarks/fidelity/sparse.py [--rows 20000] [--write]

A sparse SVM as on RCV1 with every discipline; matrix completion as on Jumbo, and graph cuts as on Abdomen (a grid) and
DBLife (an entity graph), by racing. 1, 2, 4 and 8 threads, 20 passes, steps times 0.9 after each. `--write` writes
sparse.md beside this file. Takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

sys.path.insert(0, str(Path(__file__).parents[1]))
from disciplines import OTHER, ComparedLearning
from rcv1_like import FEATURES, split
from second_core import Pair

from paceline.sparse.completion import Completion
from paceline.sparse.cuts import GraphCut
from paceline.sparse.linear import LinearModel
from paceline.sparse.losses import CODES
from paceline.sparse.rows import rows_of
from paceline.sparse.sparsity import sparsity_of
from paceline.sparse.steps import CONSTANT, PassPlan
from paceline.sparse.team import Team
from paceline.system.machine import machine, versions

PASSES, BETA, THREADS = 20, 0.9, (1, 2, 4, 8)


def time_passes(make_pass: Callable[[float], Any], eta: float) -> float:
    """Median seconds of a pass, of all but the first."""
    return float(np.median([make_pass(eta * BETA**number).seconds for number in range(PASSES)][1:]))


def svm(rows: int) -> list[str]:
    """A sparse SVM, every discipline."""
    X, y, X_test, y_test = split(rows)
    view = rows_of(X)
    found = sparsity_of(view, FEATURES)
    plan = PassPlan(CODES["hinge"], 0.1, CONSTANT, 0.5, 0.5, 1.0, 0.0, 1e-6, False, False, 0.01, 256)
    lines = [
        f"## SVM, RCV1-like: {rows:,} x {FEATURES:,}, {X.nnz:,} non-zeros; rho {found.rho:.2f}, Delta {found.delta:.2f}",
        "",
        "Seconds per pass, speed-up over one thread that races alone, mean hinge loss and test error after 20 passes.",
        "",
        "| discipline | threads | s per pass | speed-up | objective | test error |",
        "|---|---|---|---|---|---|",
    ]
    serial = 0.0
    for discipline in ("shared", "copies", *OTHER):
        for threads in THREADS:
            model = LinearModel(FEATURES, 1, X.dtype)
            with Team(threads) as team:
                learn = partial(ComparedLearning, model) if discipline in OTHER else model.learn
                learning = learn(view, y, plan, team, discipline=discipline)
                seconds = time_passes(lambda eta, learning=learning: learning.make_pass(eta=eta), plan.eta)
                learning.settle()
            serial = serial or seconds
            w, b = model.coordinates[:, 0], model.intercepts[0]
            objective = float(np.maximum(0, 1 - y * (X @ w + b)).mean())
            error = float(np.mean(np.sign(X_test @ w + b) != y_test))
            name = "Hogwild! (shared)" if discipline == "shared" else discipline
            lines.append(
                f"| {name} | {threads} | {seconds:.4f} | {serial / seconds:.2f} | {objective:.4f} | {error:.4f} |"
            )
            print(lines[-1], flush=True)
    return lines


def jumbo(rows: int) -> list[str]:
    """Entries of a matrix of rank 10, learned at rank 10."""
    users, items, each, rank = rows, rows // 2, 40, 10
    random = np.random.default_rng(0)
    columns = np.sort(random.integers(0, items, (users, each)), axis=1).astype(np.int32)
    left, right = random.standard_normal((users, rank)), random.standard_normal((items, rank))
    begins = np.arange(users + 1, dtype=np.int32) * each
    values = (np.einsum("ur,ukr->uk", left, right[columns]) / np.sqrt(rank)).ravel().astype(np.float32)
    matrix = sparse.csr_matrix((values, columns.ravel(), begins), (users, items))
    fullest = np.bincount(columns.ravel()).max()
    lines = [
        "",
        f"## Matrix completion, Jumbo-like: {users:,} x {items:,}, rank {rank}, {matrix.nnz:,} entries; "
        f"rho {(each + fullest - 1) / matrix.nnz:.1e}, Delta {max(fullest, each) / matrix.nnz:.1e}",
        "",
        "| threads | s per pass | speed-up | train error (RMSE; the entries' is 1.0) |",
        "|---|---|---|---|",
    ]
    return lines + curve(
        lambda team: Completion(rows_of(matrix), items, rank, alpha=0.01, biased=False, team=team, seed=0, spread=0.3),
        lambda problem: problem.passes[-1].loss,
        0.1,
    )


def cuts(title: str, edges: np.ndarray, weights: np.ndarray, labels: int, given: dict[int, int]) -> list[str]:
    """A graph cut with some nodes' labels known."""
    degrees = np.bincount(edges.ravel())
    meeting = (degrees[edges[:, 0]] + degrees[edges[:, 1]] - 1).max()
    lines = [
        "",
        f"## Cuts, {title}: {degrees.size:,} nodes, {len(edges):,} edges, {labels} labels; "
        f"rho {meeting / len(edges):.1e}, Delta {degrees.max() / len(edges):.1e}",
        "",
        "| threads | s per pass | speed-up | objective |",
        "|---|---|---|---|",
    ]
    return lines + curve(lambda team: GraphCut(edges, weights, labels, given, team), lambda cut: cut.objective(), 0.1)


def grid(side: int) -> list[str]:
    """Voxels joined to their neighbours, weights by a smooth image; labels known at two ends."""
    nodes = np.arange(side**3).reshape(side, side, side)
    pairs = [
        np.stack([nodes.take(range(side - 1), axis), nodes.take(range(1, side), axis)], -1).reshape(-1, 2)
        for axis in range(3)
    ]
    edges = np.concatenate(pairs)
    weights = 0.1 + np.random.default_rng(0).random(len(edges))
    given = dict.fromkeys(nodes[0].ravel().tolist(), 0) | dict.fromkeys(nodes[-1].ravel().tolist(), 1)
    return cuts("Abdomen-like grid", edges, weights, 2, given)


def entities(mentions: int) -> list[str]:
    """Mentions that look alike, of entities in groups; a tenth of the mentions is known."""
    random = np.random.default_rng(0)
    labels = 20
    truth = random.integers(0, labels, mentions)
    members = [np.flatnonzero(truth == label) for label in range(labels)]
    edges = [random.integers(0, mentions, (2 * mentions, 2))]
    edges += [random.choice(group, (12 * len(group), 2)) for group in members]
    joined = np.concatenate(edges)
    joined = joined[joined[:, 0] != joined[:, 1]]
    weights = np.where(truth[joined[:, 0]] == truth[joined[:, 1]], 1.0, 0.3)
    given = {int(node): int(truth[node]) for node in random.choice(mentions, mentions // 10, replace=False)}
    return cuts("DBLife-like entities", joined, weights, labels, given)


def curve(problem: Callable[[Team], Any], measure: Callable[[Any], float], eta: float) -> list[str]:
    """One row per number of threads."""
    lines, serial = [], 0.0
    for threads in THREADS:
        with Team(threads) as team:
            made = problem(team)
            seconds = time_passes(made.make_pass, eta)
        serial = serial or seconds
        lines.append(f"| {threads} | {seconds:.4f} | {serial / seconds:.2f} | {measure(made):.4f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    pair = Pair()
    controls = [pair.control() for _ in range(20)]
    lines = [*svm(chosen.rows), *jumbo(chosen.rows), *grid(50), *entities(5_000)]
    controls += [pair.control() for _ in range(20)]
    about, used = machine(), versions()
    head = [
        "# The Hogwild! paper's comparison, regenerated",
        "",
        "Two threads are compared with one thread that races alone. The machine's limit stands beside them: what two threads"
        " that share nothing gain at the same time. The raw runs are not in the repository.",
        "",
        f"Machine: {about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB. Python {used['python']}, "
        f"Numba {used['numba']}. Command: `python benchmarks/fidelity/sparse.py --rows {chosen.rows} --write`.",
        f"Two threads that share nothing made {np.median(controls):.2f}x of one (median of {len(controls)}); load average "
        f"{os.getloadavg()[0]:.1f}. More threads than cores cannot be faster: 4 and 8 show what waiting costs.",
        "",
    ]
    if chosen.write:
        Path(__file__).with_suffix(".md").write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
