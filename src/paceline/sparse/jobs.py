"""What the command line asks for: a file fitted and reported, a model written and read, predictions."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from paceline.errors import UsageError
from paceline.integrations.factorization import HogwildMatrixFactorization
from paceline.integrations.sklearn import HogwildClassifier, HogwildRegressor
from paceline.sparse.files import read_labelled, read_ratings
from paceline.sparse.linear import Pass
from paceline.sparse.losses import CODES, REGRESSION, value_of
from paceline.sparse.matrix import rows_of
from paceline.sparse.options import plan_for
from paceline.sparse.sparsity import measure_speed_up, sparsity_of, verdict
from paceline.sparse.team import count_threads

__all__ = ["fit_linear", "fit_ratings", "predict", "write_model"]

Progress = Callable[[int, Pass], None]
Arrays = dict[str, np.ndarray]


def fit_linear(data: Path, test: Path | None, progress: Progress, **options: Any) -> tuple[dict[str, Any], Arrays]:
    """Fit a classifier, or a regression if the loss is one's; returns what to report, and the model."""
    if options["loss"] not in CODES:
        known = ", ".join(name.replace("_", "-") for name in CODES)
        raise UsageError(f"Unknown loss '{options['loss']}'; choose logistic, {known}.")
    regression = options["loss"] in REGRESSION
    X, y = read_labelled(data)
    if regression and y.dtype.kind not in "fiub":
        raise UsageError(
            f"{data} has labels that are no numbers, such as '{y[0]}'; choose a loss for classes, such as hinge."
        )
    between = y[y != np.round(y)] if not regression and y.dtype.kind == "f" else y[:0]
    if between.size:
        raise UsageError(
            f"{data} has labels that are no classes, such as {between[0]:g}; choose a loss for numbers, such as squared."
        )
    estimator: Any = (HogwildRegressor if regression else HogwildClassifier)(**options)
    estimator._on_pass = progress
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of passes was asked for
        # A tolerance that nothing reaches: the loss is measured for the progress, and no pass is left out.
        if options["tol"] is None:
            estimator.set_params(tol=-1e300)
        estimator.fit(X, y)
    held, targets = (X, y) if test is None else read_labelled(test, features=X.shape[1])
    arrays = {
        "coef": np.atleast_2d(estimator.coef_), "intercept": estimator.intercept_, "loss": np.array(options["loss"]),
        **({} if regression else {"classes": estimator.classes_}),
    }  # fmt: skip
    return {**_measures(arrays, held, targets), **_speeds(estimator, X, regression)}, arrays


def _speeds(estimator: Any, X: Any, regression: bool) -> dict[str, Any]:
    """Speed, sparsity and the verdict."""
    rows = rows_of(X)
    sparsity = sparsity_of(rows, X.shape[1])
    passes = estimator.passes_[1:] or estimator.passes_
    threads, speed_up = estimator.n_threads_, None
    wanted = count_threads(estimator.n_jobs, 2**62)
    if threads > 1:
        # On labels of its own: speed depends on the matrix.
        targets = np.where(np.arange(X.shape[0]) % 2, 1, -1).astype(X.dtype)
        plan = plan_for(
            loss=estimator.loss, allowed=tuple(CODES), penalty=estimator.penalty, alpha=estimator.alpha, l1_ratio=0.15,
            learning_rate=estimator.learning_rate, eta0=estimator.eta0, power_t=estimator.power_t,
            epsilon=estimator.epsilon, fit_intercept=True, dense=rows.dense, tracking=False,
        )  # fmt: skip
        speed_up = measure_speed_up(rows, targets, plan, X.shape[1], 1, threads, discipline=estimator.discipline)
    words = verdict(sparsity, threads, wanted, speed_up)
    if estimator.deterministic:
        words = "Deterministic: updates are made one after the other, and threads do not pay."
    return {
        "examples": X.shape[0],
        "features": X.shape[1],
        "nonzeros": int(X.nnz if sparse.issparse(X) else X.size),
        "passes": estimator.n_iter_,
        "threads": threads,
        "examples_per_s": float(np.median([made.examples / made.seconds for made in passes])),
        "speed_up": speed_up,
        "staleness": float(np.mean([made.staleness for made in passes])),
        **asdict(sparsity),
        "verdict": words,
    }


def _measures(arrays: Arrays, X: Any, y: np.ndarray) -> dict[str, Any]:
    scores = np.asarray(X @ arrays["coef"].T) + arrays["intercept"]
    code = CODES[str(arrays["loss"])]
    if "classes" not in arrays:
        residuals = y - scores[:, 0]
        mean = float(np.mean([value_of(code, float(p), float(t), 0.1) for p, t in zip(scores[:, 0], y, strict=True)]))
        return {"loss": mean, "rmse": float(np.sqrt(np.mean(residuals**2)))}
    classes = arrays["classes"]
    picked = scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).astype(int)
    wanted = np.searchsorted(classes, y)
    signs = np.where(wanted[:, None] == (np.arange(len(classes)) if scores.shape[1] > 1 else [1]), 1.0, -1.0)
    pairs = zip(scores.ravel(), signs.ravel(), strict=True)
    mean = float(np.mean([value_of(code, float(p), float(t), 0.1) for p, t in pairs]))
    return {"loss": mean, "accuracy": float(np.mean(classes[picked] == y))}


def fit_ratings(data: Path, test: Path | None, progress: Progress, **options: Any) -> tuple[dict[str, Any], Arrays]:
    """Fit factors of a file of ratings."""
    ratings = read_ratings(data)
    estimator = HogwildMatrixFactorization(**options)
    estimator._on_pass = progress
    estimator.fit(ratings.matrix)
    arrays = {
        "mean": np.array(estimator.mean_), "users": ratings.users, "items": ratings.items,
        "user_factors": estimator.row_factors_, "item_factors": estimator.components_.T,
        "user_biases": estimator.row_biases_, "item_biases": estimator.column_biases_,
    }  # fmt: skip
    held = ratings if test is None else read_ratings(test)
    found, wanted = _rate(arrays, held)
    matrix: Any = ratings.matrix
    rows = rows_of(matrix)
    passes = estimator.passes_[1:] or estimator.passes_
    known = np.isfinite(found)
    threads = estimator.n_threads_
    sparsity = sparsity_of(rows, matrix.shape[1])
    return {
        "rmse": float(np.sqrt(np.mean((found - wanted)[known] ** 2))) if known.any() else None,
        "unknown": int((~known).sum()),
        "users": len(ratings.users),
        "items": len(ratings.items),
        "ratings": int(matrix.nnz),
        "passes": estimator.n_iter_,
        "threads": threads,
        "ratings_per_s": float(np.median([made.examples / made.seconds for made in passes])),
        **asdict(sparsity),
        "verdict": verdict(sparsity, threads, count_threads(estimator.n_jobs, 2**62), None),
    }, arrays


def _rate(arrays: Arrays, ratings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Predictions of a file's ratings, NaN for users or items that the model has not met; and the ratings."""
    entries: Any = ratings.matrix.tocoo()
    user_number = {name: number for number, name in enumerate(arrays["users"].tolist())}
    item_number = {name: number for number, name in enumerate(arrays["items"].tolist())}
    users = np.array([user_number.get(name, -1) for name in ratings.users.tolist()])[entries.row]
    items = np.array([item_number.get(name, -1) for name in ratings.items.tolist()])[entries.col]
    products = np.einsum("ij,ij->i", arrays["user_factors"][users], arrays["item_factors"][items])
    found = arrays["mean"] + arrays["user_biases"][users] + arrays["item_biases"][items] + products
    return np.where((users < 0) | (items < 0), np.nan, found), entries.data


def write_model(path: Path, arrays: Arrays) -> None:
    """One NPZ file of plain arrays."""
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _read_model(path: Path) -> Arrays:
    if not path.is_file():
        raise UsageError(f"{path} is not a file; name what `paceline sparse fit --model` wrote.")
    try:
        with np.load(path, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise UsageError(f"{path} is not a model: {error}.") from error
    if "coef" not in arrays and "user_factors" not in arrays:
        raise UsageError(f"{path} is not a model; name what `paceline sparse fit --model` wrote.")
    return arrays


def predict(model: Path, data: Path, *, probabilities: bool) -> tuple[list[str], dict[str, Any]]:
    """One line per example, and how good they are where the data has labels."""
    arrays = _read_model(model)
    if ("user_factors" in arrays) != (data.suffix == ".csv"):
        kind = "ratings, and needs a .csv file" if "user_factors" in arrays else "rows, and needs svmlight or .npz"
        raise UsageError(f"{model} is a model of {kind}, not {data}.")
    if "user_factors" in arrays:
        held = read_ratings(data)
        found, wanted = _rate(arrays, held)
        known = np.isfinite(found)
        entries: Any = held.matrix.tocoo()
        lines = [
            f"{held.users[user]},{held.items[item]},{value:.6g}"
            for user, item, value in zip(entries.row, entries.col, found, strict=True)
        ]
        error = float(np.sqrt(np.mean((found - wanted)[known] ** 2))) if known.any() else None
        return lines, {"examples": len(lines), **({} if error is None else {"rmse": error})}
    X, y = read_labelled(data, features=arrays["coef"].shape[1], labels=False)
    if X.shape[1] != arrays["coef"].shape[1]:
        raise UsageError(f"{data} has {X.shape[1]} features, and the model knows {arrays['coef'].shape[1]}.")
    scores = np.asarray(X @ arrays["coef"].T) + arrays["intercept"]
    if "classes" not in arrays:
        return [f"{value:.6g}" for value in scores[:, 0]], {"examples": len(y), **_measures(arrays, X, y)}
    classes = arrays["classes"]
    if probabilities:
        if str(arrays["loss"]) != "log_loss":
            raise UsageError(f"--probabilities needs a model of logistic loss, not {arrays['loss']}.")
        chances = 1 / (1 + np.exp(-scores))
        chances = np.column_stack([1 - chances, chances]) if chances.shape[1] == 1 else chances
        chances /= chances.sum(axis=1, keepdims=True)
        lines = [" ".join(f"{value:.6g}" for value in row) for row in chances]
    else:
        picked = scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).astype(int)
        lines = [f"{label:g}" if isinstance(label, (int, float)) else str(label) for label in classes[picked].tolist()]
    known = np.isin(y, classes).all()
    return lines, {"examples": len(y), **(_measures(arrays, X, y) if known else {})}
