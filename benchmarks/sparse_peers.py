"""Time to equal test loss against libraries that need an environment of their own: Snap ML, LIBMF.

    python -m venv peers && peers/bin/pip install snapml libmf scikit-learn scipy "numpy<2"
    python benchmarks/sparse_peers.py --peer peers/bin/python

In parts: `--only linear`, and `--only ratings --passes 20 --etas 0.2 --penalties 0.02`. Two threads each. The peer is
fitted as it comes; ours makes passes until its test loss is the peer's. Prints rows for results/sparse.md. Compile time
is excluded.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rcv1_like import split
from scipy import sparse

from paceline.sklearn import HogwildClassifier, HogwildMatrixFactorization

REPEATS = 3


def fit_peer(python: str, name: str, arrays: dict[str, Any]) -> tuple[float, str, Any]:
    """Seconds (the least of three), version, and test scores, or LIBMF's test error."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "data.npz")
        np.savez(path, **arrays)
        command = [python, str(Path(__file__).with_name("peer_fits.py")), name, path]
        told, error = [], math.nan
        for _ in range(REPEATS):
            lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            told += [json.loads(line) for line in lines if line.startswith("{")]
            error = next((float(line.split()[2]) for line in reversed(lines) if line[:4].strip().isdigit()), error)
        scores = np.load(path + ".npy")
        return min(one["seconds"] for one in told), told[0]["version"], scores if scores.size else error


def timed(estimator: Any, *data: Any) -> float:
    """The least of three fits."""
    seconds = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        estimator.fit(*data)
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


def linear(python: str, rows: int) -> None:
    """Snap ML's logistic regression and SVM."""
    X, y, X_test, y_test = split(rows)
    parts = {
        prefix + field: getattr(matrix, field)
        for prefix, matrix in (("", X), ("test_", X_test))
        for field in ("data", "indices", "indptr", "shape")
    }
    for name, loss in (("snapml-log", "log_loss"), ("snapml-svm", "hinge")):

        def measure(scores: np.ndarray, loss: str = loss) -> float:
            margins = y_test * scores
            return float((np.logaddexp(0, -margins) if loss == "log_loss" else np.maximum(0, 1 - margins)).mean())

        theirs_s, version, scores = fit_peer(python, name, parts | {"y": y})
        goal = measure(scores)
        for passes in range(1, 41):
            ours = HogwildClassifier(
                loss, alpha=1 / rows, learning_rate="decay", eta0=4.0, decay=0.7, max_iter=passes, tol=None, n_jobs=2,
                random_state=0,
            )  # fmt: skip
            ours_s = timed(ours, X, y)
            reached = measure(ours.decision_function(X_test))
            if reached <= goal:
                break
        show(
            f"Snap ML {version}, {loss}",
            ours_s,
            theirs_s,
            f"test loss {reached:.4f} after {passes} passes, its {goal:.4f}",
        )


def ratings(python: str, users: int, passes_of_peer: list[int], etas: list[float], penalties: list[float]) -> None:
    """LIBMF on a matrix of rank 8 with noise; a tenth of the entries is for testing."""
    items, each, rank = users // 4, 60, 8
    random = np.random.default_rng(0)
    columns = np.array([random.choice(items, each, replace=False) for _ in range(users)])
    left, right = random.standard_normal((users, rank)), random.standard_normal((items, rank))
    truth = 3 + np.einsum("ur,ukr->uk", left, right[columns]) / np.sqrt(rank)
    values = (truth + 0.3 * random.standard_normal(truth.shape)).astype(np.float32)
    test = random.random(values.shape) < 0.1
    rows = np.repeat(np.arange(users), each).reshape(users, each)
    arrays = {
        "users": rows[~test], "items": columns[~test], "ratings": values[~test], "rank": rank,
        "test_users": rows[test], "test_items": columns[test], "test_ratings": values[test],
    }  # fmt: skip
    matrix = sparse.csr_matrix((values[~test], (rows[~test], columns[~test])), (users, items))

    def measure(scores: np.ndarray) -> float:
        return float(np.sqrt(np.mean((scores - values[test]) ** 2)))

    for their_passes in passes_of_peer:
        tried = [
            (
                eta,
                penalty,
                *fit_peer(python, "libmf", arrays | {"passes": their_passes, "penalty": penalty, "eta": eta}),
            )
            for eta in etas
            for penalty in penalties
        ]
        eta, penalty, theirs_s, version, goal = min(tried, key=lambda fit: fit[-1])
        for passes in range(2, 61):
            ours = HogwildMatrixFactorization(
                rank, alpha=2.0, eta0=0.1, decay=0.93, max_iter=passes, tol=None, n_jobs=2, random_state=0
            )
            ours_s = timed(ours, matrix)
            reached = measure(ours.predict_entries(rows[test], columns[test]))
            if reached <= goal:
                break
        best = f"{their_passes} passes, its best eta {eta} and penalty {penalty}"
        show(
            f"LIBMF {version}, {best}, {matrix.nnz:,} ratings, rank {rank}",
            ours_s, theirs_s,
            f"test RMSE {reached:.4f} after {passes} passes, its {goal:.4f}",
        )  # fmt: skip


def show(peer: str, ours_s: float, theirs_s: float, words: str) -> None:
    """A row of the table."""
    print(
        f"| time to equal test loss, 2 threads, against {peer} | {ours_s:.3f} s | {theirs_s:.3f} s | "
        f"**{theirs_s / ours_s:.1f}**; {words} | |",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", default=sys.executable, help="Python of the environment that has the peers")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--only", choices=("linear", "ratings"))
    parser.add_argument("--passes", type=int, nargs="+", default=[20, 60], help="of LIBMF")
    parser.add_argument("--etas", type=float, nargs="+", default=[0.1, 0.2, 0.4], help="of LIBMF; the best counts")
    parser.add_argument("--penalties", type=float, nargs="+", default=[0.02, 0.05], help="of LIBMF; the best counts")
    chosen = parser.parse_args()
    if chosen.only != "ratings":
        linear(chosen.peer, chosen.rows)
    if chosen.only != "linear":
        ratings(chosen.peer, chosen.users, chosen.passes, chosen.etas, chosen.penalties)


if __name__ == "__main__":
    main()
