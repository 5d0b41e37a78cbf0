"""Sparse Hogwild! against scikit-learn, and two threads against one: ratios, measured in turn in one run.

    python benchmarks/sparse.py [--pairs 5] [--rows 100000] [--only sgd,threads,liblinear,cold,memory,news] [--write]

Prints a table; `--write` makes it benchmarks/results/sparse.md, where the words beside it are then lost. A ratio above 1
means that the first-named is faster. Every figure is the median over interleaved pairs; in brackets the middle half.
Compile time is excluded but in `cold`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from rcv1_like import FEATURES, NONZEROS, split
from second_core import TWO_CORES, Pair
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.svm import LinearSVC

from paceline.memory.atomics import fetch_add
from paceline.sklearn import HogwildClassifier
from paceline.sparse.instructions import FAST
from paceline.sparse.linear import Learning, LinearModel
from paceline.sparse.losses import CODES, slope_of
from paceline.sparse.rows import Rows, add, dot, prefetch_rows, rows_of
from paceline.sparse.sparsity import sparsity_of
from paceline.sparse.steps import CONSTANT, PassPlan
from paceline.sparse.team import Team, shuffle
from paceline.system.machine import machine, versions

RESULTS = Path(__file__).parent / "results" / "sparse.md"
PASSES = 5


def summary(values: Sequence[float] | np.ndarray, digits: int = 2) -> str:
    """Median and middle half."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"**{middle:.{digits}f}** ({low:.{digits}f} to {high:.{digits}f}, {len(values)} times)"


def seconds(action: object) -> float:
    """How long a call takes."""
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def against_sgd(rows: int, pairs: int) -> list[str]:
    """One thread against SGDClassifier: same data, passes and constant step; whole fits."""
    lines = []
    X, y, X_test, y_test = split(rows)
    for loss in ("log_loss", "hinge"):
        options = {
            "alpha": 1e-6,
            "learning_rate": "constant",
            "eta0": 0.5,
            "max_iter": PASSES,
            "tol": None,
            "random_state": 0,
        }
        ours, theirs = HogwildClassifier(loss, n_jobs=1, **options), SGDClassifier(loss, **options)
        ours.fit(X[:2000], y[:2000])
        times = [(seconds(lambda: ours.fit(X, y)), seconds(lambda: theirs.fit(X, y))) for _ in range(pairs)]
        ratios = [other / own for own, other in times]
        each = [statistics.median(column) / PASSES / X.nnz * 1e9 for column in zip(*times, strict=True)]
        scores = f"test accuracy {ours.score(X_test, y_test):.4f} and {theirs.score(X_test, y_test):.4f}"
        lines.append(
            f"| 1 thread, {loss}, whole fit of {PASSES} passes, against `SGDClassifier` | {each[0]:.2f} ns a non-zero | "
            f"{each[1]:.2f} ns | {summary(ratios)}; {scores} | 2.2 |"
        )
    return lines


def logistic(view: Rows, targets: np.ndarray, team: Team, seed: int, *, discipline: str = "copies") -> Learning:
    """Logistic regression by constant steps, to be made in passes."""
    plan = PassPlan(CODES["log_loss"], 0.1, CONSTANT, 1.0, 0.5, 1.0, 0.0, 1e-6, False, False, 0.01, 256)
    return LinearModel(FEATURES, 1, np.dtype("f4")).learn(view, targets, plan, team, seed=seed, discipline=discipline)


@njit(nogil=True, fastmath=FAST, cache=True, _nrt=False)
def visit(
    rows: Rows, order: np.ndarray, targets: np.ndarray, weights: np.ndarray, clock: int, writes: bool, sums: np.ndarray
) -> None:
    """A pass without anything that threads exchange: the same rows and gathers; updates of `weights` if it `writes`."""
    total = 0.0
    while True:
        start = fetch_add(clock, 1) * 256
        if start >= order.size:
            break
        for position in range(start, min(start + 256, order.size)):
            prefetch_rows(rows, order, targets, position, order.size)
            row = np.uint64(order[np.uint64(position)])
            head, end = np.uint64(rows.begins[row]), np.uint64(rows.begins[row + np.uint64(1)])
            slope = slope_of(0, float(dot(rows, head, end, weights)), float(targets[row]), 0.1)
            total += slope
            if writes:
                add(rows, head, end, weights, -0.3 * slope)
    sums[0] = total  # so that reading is not left out as useless


def timed_visit(view: Rows, targets: np.ndarray, team: Team, *, writes: bool) -> Callable[[], float]:
    """Seconds of `visit` on all threads of a team, each with weights of its own."""
    order = np.arange(len(targets), dtype=np.int32)
    own = [(np.zeros(FEATURES, view.values.dtype), np.zeros(16)) for _ in range(team.threads)]

    def once() -> float:
        shuffle(order, int(order[0]))
        return seconds(
            lambda: team.run(lambda i: visit(view, order, targets, own[i][0], team.clock, writes, own[i][1]))
        )

    return once


def threads(rows: int, pairs: int, skewed: tuple[bool, ...] = (True, False)) -> list[str]:
    """Two threads against one: only reading, each with weights of its own, with copies merged, all shared; and test losses.

    A round is one pass of each kind between two controls (`second_core.py`); there are ten in a pair.
    """
    lines = []
    pair = Pair()
    for hot in skewed:
        X, y, X_test, y_test = split(rows, skewed=hot)
        view = rows_of(X)
        found = sparsity_of(view, FEATURES)
        with Team(1) as first, Team(2) as both:
            alone = logistic(view, y, first, 0)
            merged, shared = logistic(view, y, both, 0), logistic(view, y, both, 0, discipline="shared")
            kinds: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
                "only reading": (
                    timed_visit(view, y, first, writes=False),
                    timed_visit(view, y, both, writes=False),
                ),
                "weights of its own, never merged": (
                    timed_visit(view, y, first, writes=True),
                    timed_visit(view, y, both, writes=True),
                ),
                "copies merged": (lambda: alone.make_pass().seconds, lambda: merged.make_pass().seconds),
                "all shared": (lambda: alone.make_pass().seconds, lambda: shared.make_pass().seconds),
            }
            rounds, controls = [], []
            for _ in range(10 * pairs + 1):  # the first warms caches and threads
                before = pair.control()
                rounds.append([[kind() / X.nnz * 1e9 for kind in kinds[name]] for name in kinds])
                controls.append(min(before, pair.control()))
            losses = {
                name: [test_loss(view, y, X_test, y_test, team, seed, discipline) for seed in range(3)]
                for name, team, discipline in (
                    ("1 thread", first, "copies"),
                    ("copies merged", both, "copies"),
                    ("all shared", both, "shared"),
                )
            }
        times, good = np.array(rounds[1:]), np.array(controls[1:]) >= TWO_CORES
        kept = times[good] if good.sum() >= 5 else times
        gains = kept[:, :, 0] / kept[:, :, 1]
        data = "skewed data" if hot else "no hot features"
        lines.append(
            f"| {data}: Omega {found.omega}, Delta {found.delta:.3f}, rho {found.rho:.3f}; arithmetic in registers, the "
            f"control | - | - | {summary(controls[1:])}; {good.sum()} of {len(good)} rounds had two cores | |"
        )
        for column, name in enumerate(kinds):
            one, two = np.median(kept[:, column], axis=0)
            words = summary(gains[:, column])
            if name in losses:
                worst = max(abs(a - b) for a, b in zip(losses[name], losses["1 thread"], strict=True))
                words += (
                    f"; {np.median(gains[:, column] / gains[:, 0]):.2f} of what reading gains; test loss "
                    f"{np.mean(losses[name]):.4f}, one thread's {np.mean(losses['1 thread']):.4f}, at most {worst:.4f} apart"
                )
            target = ("1.7" if hot else "1.9") if name == "copies merged" else ""
            lines.append(f"| {data}: 2 threads, {name}, against 1 | {two:.2f} ns | {one:.2f} ns | {words} | {target} |")
    return lines


def test_loss(
    view: Rows, y: np.ndarray, X_test: Any, y_test: np.ndarray, team: Team, seed: int, discipline: str
) -> float:
    """After 15 passes with steps times 0.9 after each."""
    learning = logistic(view, y, team, seed, discipline=discipline)
    for number in range(3 * PASSES):
        learning.make_pass(eta=0.9**number)
    learning.settle()
    scores = X_test @ learning.model.coordinates[:, 0] + learning.model.intercepts[0]
    return float(np.logaddexp(0, -y_test * scores).mean())


def liblinear(rows: int, pairs: int) -> list[str]:
    """Time to LIBLINEAR's test loss: passes are made until it is reached."""
    lines = []
    X, y, X_test, y_test = split(rows // 2)
    for name, peer, loss in (
        ("LogisticRegression(solver='liblinear')", LogisticRegression(solver="liblinear"), "log_loss"),
        ("LinearSVC", LinearSVC(loss="hinge"), "hinge"),
    ):

        def measure(fitted: object, loss: str = loss) -> float:
            margins = y_test * fitted.decision_function(X_test)
            return float((np.logaddexp(0, -margins) if loss == "log_loss" else np.maximum(0, 1 - margins)).mean())

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = [seconds(lambda: peer.fit(X, y)) for _ in range(min(pairs, 3))]
        goal = measure(peer)
        for passes in range(1, 31):
            ours = HogwildClassifier(
                loss,
                alpha=1 / len(y),
                learning_rate="decay",
                eta0=4.0,
                decay=0.7,
                max_iter=passes,
                tol=None,
                random_state=0,
            )
            own_s = min(seconds(lambda: ours.fit(X, y)) for _ in range(3))
            if measure(ours) <= goal:
                break
        reached = f"test loss {measure(ours):.4f} after {passes} passes, its {goal:.4f}"
        lines.append(
            f"| time to equal test loss, 2 threads, against {name} | {own_s:.3f} s | {statistics.median(theirs):.3f} s | "
            f"**{statistics.median(theirs) / own_s:.1f}**; {reached} | |"
        )
    return lines


COLD = """
import time, numpy as np, scipy.sparse as s
from paceline.sklearn import HogwildClassifier
X = s.random(4000, 1000, 0.05, "csr", dtype=np.float32, random_state=0); y = np.arange(4000) % 2
began = time.perf_counter(); HogwildClassifier(max_iter=5, tol=None).fit(X, y); print(time.perf_counter() - began)
"""


def cold(rows: int, pairs: int) -> list[str]:
    """A first fit in a new process, without and with kernels on disk."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        both = [
            float(
                subprocess.run(
                    [sys.executable, "-c", COLD], env=environment, check=True, capture_output=True, text=True
                ).stdout
            )
            for _ in range(2)
        ]
    return [
        f"| first `fit` in a new process: cold, and warm from the cache | {both[0]:.2f} s | {both[1]:.2f} s | - | 5 s more |"
    ]


def memory(rows: int, pairs: int) -> list[str]:
    """Peak memory above the input in a fit with two threads, as tracemalloc sees it (NumPy reports its arrays there)."""
    X, y, *_ = split(rows)
    fit = HogwildClassifier("log_loss", max_iter=2, tol=None, n_jobs=2)
    fit.fit(X[:20000], y[:20000])
    tracemalloc.start()
    fit.fit(X, y)
    grown = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    goal = (1.1 * 2 * FEATURES * 4 + 16 * rows) / 2**20
    return [f"| peak memory above the input, {rows:,} rows, 2 threads | {grown:.1f} MiB | - | - | {goal:.1f} MiB |"]


def news(rows: int, pairs: int) -> list[str]:
    """AG's News, TF-IDF, one against the rest: accuracy beside SGDClassifier's."""
    folder = Path(os.environ.get("PACELINE_DATA", "")) / "ag_news"
    if not folder.is_dir():
        return []
    import csv
    import gzip

    from sklearn.feature_extraction.text import TfidfVectorizer

    parts = []
    for name in ("train", "test"):
        with gzip.open(folder / f"{name}.csv.gz", "rt", newline="") as text:
            parts.append(list(zip(*((row["content"], row["label"]) for row in csv.DictReader(text)), strict=True)))
    vectorizer = TfidfVectorizer(sublinear_tf=True)
    X, X_test = vectorizer.fit_transform(parts[0][0]), vectorizer.transform(parts[1][0])
    ours, theirs = HogwildClassifier(n_jobs=2, random_state=0), SGDClassifier(random_state=0)
    ours.fit(X, parts[0][1])
    times = [
        (seconds(lambda: ours.fit(X, parts[0][1])), seconds(lambda: theirs.fit(X, parts[0][1]))) for _ in range(pairs)
    ]
    ratios = [other / own for own, other in times]
    return [
        f"| AG's News, 4 classes, defaults, 2 threads, against `SGDClassifier` | accuracy "
        f"{ours.score(X_test, parts[1][1]):.4f} | {theirs.score(X_test, parts[1][1]):.4f} | "
        f"{summary(ratios)} in time | within 0.003 |"
    ]


SECTIONS = {
    "sgd": against_sgd,
    "threads": threads,
    "threads-skewed": lambda rows, pairs: threads(rows, pairs, (True,)),
    "threads-even": lambda rows, pairs: threads(rows, pairs, (False,)),
    "liblinear": liblinear,
    "cold": cold,
    "memory": memory,
    "news": news,
}


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--only", default="sgd,threads,liblinear,cold,memory,news", help=", ".join(SECTIONS))
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    about, used = machine(), versions()
    head = [
        "# Sparse Hogwild!: linear models on RCV1-like data",
        "",
        f"Machine: {about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}. "
        f"Python {used['python']}, Numba {used['numba']}.",
        f"Command: `python benchmarks/sparse.py --pairs {chosen.pairs} --rows {chosen.rows} --only {chosen.only}`.",
        f"Data: {chosen.rows:,} x {FEATURES:,}, about {NONZEROS} non-zeros a row, float32; load average at the start "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        "| what | ours | peer | ratio | target |",
        "|---|---|---|---|---|",
    ]
    lines = []
    for name in chosen.only.split(","):
        measured = SECTIONS[name](chosen.rows, chosen.pairs)
        print(*measured, sep="\n", flush=True)
        lines += measured
    print(*head[2:6], sep="\n")
    if chosen.write:
        RESULTS.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
