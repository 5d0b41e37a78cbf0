"""The jobs of `paceline sparse`: fit a file and report, write and read a model, predict."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from paceline.errors import UsageError, shown
from paceline.integrations.factorization import HogwildMatrixFactorization
from paceline.integrations.sklearn import HogwildClassifier, HogwildRegressor
from paceline.sparse.completion import Completion
from paceline.sparse.files import read_labelled, read_ratings
from paceline.sparse.linear import DivergedError, LinearModel, Pass
from paceline.sparse.losses import CODES, REGRESSION, value_of
from paceline.sparse.rows import rows_of
from paceline.sparse.sparsity import Sparsity, measure_speed_up, sparsity_of, sparsity_of_ratings, verdict
from paceline.sparse.team import Team, count_threads
from paceline.specs.bounds import PARAMETERS, check_memory
from paceline.system import files
from paceline.system.plain_files import read_npz

Progress = Callable[[int, Pass], None]
Arrays = dict[str, np.ndarray]

_MODELS = (
    {"coef", "intercept", "loss"},
    {"mean", "users", "items", "user_factors", "item_factors", "user_biases", "item_biases"},
)
_FACTOR_BYTES = 3 * 8  # during training, in the model, and for prediction
_DETERMINISTIC = "Deterministic: updates are made one after the other, and threads do not pay."


def fit_linear(data: Path, test: Path | None, progress: Progress, **options: Any) -> tuple[dict[str, Any], Arrays]:
    """Fit a classifier, or a regression if the loss is one for regression; returns the report and the model."""
    if options["loss"] not in CODES:
        known = ", ".join(name.replace("_", "-") for name in CODES)
        raise UsageError(f"Unknown loss '{options['loss']}'; choose logistic, {known}.")
    regression = options["loss"] in REGRESSION
    X, y = read_labelled(data)
    if regression and y.dtype.kind not in "fiub":
        raise UsageError(
            f"{data} has labels that are not numbers, such as '{y[0]}'; choose a loss for classes, such as hinge."
        )
    between = y[y != np.round(y)] if not regression and y.dtype.kind == "f" else y[:0]
    if between.size:
        raise UsageError(
            f"{data} has labels that are not classes, such as {between[0]:g}; choose a loss for numbers, such as "
            "squared."
        )
    held, targets = (X, y) if test is None else read_labelled(test, features=X.shape[1])
    if held.shape[1] != X.shape[1]:
        raise UsageError(f"{test} has {held.shape[1]} features, but {data} has {X.shape[1]}.")
    strange = targets[~np.isin(targets, y)] if not regression else targets[:0]
    if strange.size:
        raise UsageError(f"{test} has labels that {data} does not have, such as {_word(strange.tolist()[0])}.")
    estimator: Any = (HogwildRegressor if regression else HogwildClassifier)(**options)
    estimator._on_pass = progress
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of passes was asked for
        # An unreachable tolerance: the loss is measured for the progress report, and every pass runs.
        if options["tol"] is None:
            estimator.set_params(tol=-1e300)
        estimator.fit(X, y)
    if estimator.passes_[-1].limited:
        raise DivergedError(
            "The fit diverged: slopes had to be limited. Scale the data, or change --eta0 or --learning-rate."
        )
    arrays = {
        "coef": np.atleast_2d(estimator.coef_), "intercept": estimator.intercept_, "loss": np.array(options["loss"]),
        **({} if regression else {"classes": estimator.classes_}),
    }  # fmt: skip
    return {**_measures(arrays, held, targets), **_speeds(estimator, X, y, regression)}, arrays


def _word(label: Any) -> str:
    """A label as a file writes it: 3 and not 3.0."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def _speeds(estimator: Any, X: Any, y: np.ndarray, regression: bool) -> dict[str, Any]:
    """Size, speed, sparsity and the verdict of a linear model's fit."""
    rows = rows_of(X)
    outputs = len(estimator.classes_) if not regression and len(estimator.classes_) > 2 else 1
    targets = y if regression else np.searchsorted(estimator.classes_, y)
    targets = np.asarray(2 * targets - 1 if not regression and outputs == 1 else targets, X.dtype)
    plan = estimator.plan(dense=rows.dense, tracking=False)

    def begin(team: Team) -> Callable[[], Pass]:
        model = LinearModel(X.shape[1], outputs, X.dtype)
        return model.learn(rows, targets, plan, team, discipline=estimator.discipline).make_pass

    return {
        "examples": X.shape[0],
        "features": X.shape[1],
        "nonzeros": int(X.nnz if sparse.issparse(X) else X.size),
        **_pace(estimator, "examples", estimator.discipline_, sparsity_of(rows, X.shape[1]), begin),
    }


def _pace(
    estimator: Any, what: str, discipline: str, sparsity: Sparsity, begin: Callable[[Team], Callable[[], Pass]]
) -> dict[str, Any]:
    """Speed of a fit, sparsity of its problem, and whether threads pay; `begin` as in `measure_speed_up`."""
    passes = estimator.passes_[1:] or estimator.passes_
    threads = estimator.n_threads_
    speed_up = measure_speed_up(begin, threads) if threads > 1 else None
    words = verdict(sparsity, threads, count_threads(estimator.n_jobs, 2**62), speed_up)
    return {
        "passes": estimator.n_iter_,
        "threads": threads,
        "discipline": discipline,
        f"{what}_per_s": float(np.median([made.examples / made.seconds for made in passes])),
        "speed_up": speed_up,
        "staleness": float(np.mean([made.staleness for made in passes])),
        **asdict(sparsity),
        "verdict": _DETERMINISTIC if estimator.deterministic else words,
    }


def _scores(arrays: Arrays, X: Any) -> np.ndarray:
    return np.asarray(X @ arrays["coef"].T) + arrays["intercept"]


def _picked(classes: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The class that each row of scores selects."""
    return classes[scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).astype(int)]


def _measures(arrays: Arrays, X: Any, y: np.ndarray) -> dict[str, Any]:
    scores = _scores(arrays, X)
    if (classes := arrays.get("classes")) is None:
        targets, how_good = y[:, None], {"rmse": float(np.sqrt(np.mean((y - scores[:, 0]) ** 2)))}
    else:
        own = np.arange(len(classes)) if scores.shape[1] > 1 else [1]
        targets = np.where(np.searchsorted(classes, y)[:, None] == own, 1.0, -1.0)
        how_good = {"accuracy": float(np.mean(_picked(classes, scores) == y))}
    code, pairs = CODES[str(arrays["loss"])], zip(scores.ravel(), targets.ravel(), strict=True)
    return {"loss": float(np.mean([value_of(code, float(p), float(t), 0.1) for p, t in pairs])), **how_good}


def fit_ratings(data: Path, test: Path | None, progress: Progress, **options: Any) -> tuple[dict[str, Any], Arrays]:
    """Fit factors of a file of ratings."""
    ratings = read_ratings(data)
    held = ratings if test is None else read_ratings(test)
    rank = options["n_components"]
    PARAMETERS.check("--rank", rank)
    check_memory(
        _FACTOR_BYTES * rank * (len(ratings.users) + len(ratings.items)),
        f"factors of rank {rank:,}",
        "lower --rank, which is 10 by default",
    )
    estimator: Any = HogwildMatrixFactorization(**options)
    estimator._on_pass = progress
    estimator.fit(ratings.matrix)
    arrays = {
        "mean": np.array(estimator.mean_), "users": ratings.users, "items": ratings.items,
        "user_factors": estimator.row_factors_, "item_factors": estimator.components_.T,
        "user_biases": estimator.row_biases_, "item_biases": estimator.column_biases_,
    }  # fmt: skip
    found, wanted = _rate(arrays, held)
    matrix: Any = ratings.matrix
    rows = rows_of(matrix)

    def begin(team: Team) -> Callable[[], Pass]:
        begun = Completion(
            rows, matrix.shape[1], estimator.n_components, alpha=estimator.alpha, biased=estimator.biases, team=team,
            seed=0, spread=estimator.init_scale,
        )  # fmt: skip
        return lambda: begun.make_pass(estimator.eta0)

    return {
        "rmse": _rmse(found, wanted),
        "unknown": int((~np.isfinite(found)).sum()),
        "users": len(ratings.users),
        "items": len(ratings.items),
        "ratings": int(matrix.nnz),
        **_pace(estimator, "ratings", "shared", sparsity_of_ratings(rows, matrix.shape[1], rank), begin),
    }, arrays


def _rmse(found: np.ndarray, wanted: np.ndarray) -> float | None:
    """RMSE over the ratings for which the model has a prediction; None: it has none."""
    known = np.isfinite(found)
    return float(np.sqrt(np.mean((found - wanted)[known] ** 2))) if known.any() else None


def _rate(arrays: Arrays, ratings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Predictions for a file's ratings, NaN for unknown users or items; and the ratings."""
    entries: Any = ratings.matrix.tocoo()
    user_number = {name: number for number, name in enumerate(arrays["users"].tolist())}
    item_number = {name: number for number, name in enumerate(arrays["items"].tolist())}
    users = np.array([user_number.get(name, -1) for name in ratings.users.tolist()])[entries.row]
    items = np.array([item_number.get(name, -1) for name in ratings.items.tolist()])[entries.col]
    products = np.einsum("ij,ij->i", arrays["user_factors"][users], arrays["item_factors"][items])
    found = arrays["mean"] + arrays["user_biases"][users] + arrays["item_biases"][items] + products
    return np.where((users < 0) | (items < 0), np.nan, found), entries.data


def write_model(path: Path, arrays: Arrays) -> None:
    """One NPZ file of plain arrays, whole or not at all."""
    with files.replacing(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _read_model(path: Path) -> Arrays:
    if not path.is_file():
        raise UsageError(f"{path} is not a file; name one that `paceline sparse fit --model` wrote.")
    arrays = read_npz(path, "name what `paceline sparse fit --model` wrote")
    if not any(names <= arrays.keys() for names in _MODELS):
        raise UsageError(f"{path} is not a model; name a file that `paceline sparse fit --model` wrote.")
    wrong = _wrong_ratings(arrays) if "user_factors" in arrays else _wrong_linear(arrays)
    if wrong:
        raise UsageError(f"{path} is not a model: {wrong}; fit it again.")
    return arrays


def _wrong_linear(arrays: Arrays) -> str:
    """An inconsistency in a linear model; empty: none."""
    coef, loss, classes = arrays["coef"], arrays["loss"], arrays.get("classes")
    if coef.ndim != 2 or not coef.size or not _are_finite(coef):
        return "its coef are not numbers in rows and columns"
    if arrays["intercept"].shape != (len(coef),) or not _are_finite(arrays["intercept"]):
        return f"its intercept is not {len(coef)} numbers, one for each row of coef"
    if loss.ndim or str(loss) not in CODES:
        return f"its loss {shown(loss.tolist())} is unknown"
    if str(loss) in REGRESSION:
        return "it is a regression, which has one output and no classes" if classes is not None or len(coef) > 1 else ""
    if classes is None or classes.ndim != 1 or classes.dtype.kind not in "fiubU":
        return "it has no classes"
    if len(np.unique(classes)) != len(classes) or not (classes[:-1] < classes[1:]).all():
        return "its classes are not different ones in ascending order"
    return (
        ""
        if len(coef) == (1 if len(classes) == 2 else len(classes))
        else f"it has {len(classes)} classes, and {len(coef)} rows"
    )


def _wrong_ratings(arrays: Arrays) -> str:
    """An inconsistency in a model of ratings; empty: none."""
    rank = arrays["user_factors"].shape[-1:]
    shapes = {"mean": ()}
    for what in ("user", "item"):
        names = arrays[f"{what}s"]
        if names.ndim != 1 or names.dtype.kind != "U" or len(np.unique(names)) != len(names):
            return f"its {what}s are not different names"
        shapes |= {f"{what}_factors": (len(names), *rank), f"{what}_biases": (len(names),)}
    for name, shape in shapes.items():
        if arrays[name].shape != shape or not _are_finite(arrays[name]):
            return f"its {name} are not finite numbers of the shape {shape}"
    return ""


def _are_finite(array: np.ndarray) -> bool:
    return array.dtype.kind in "fiu" and bool(np.isfinite(array).all())


def _csv_line(*fields: str) -> str:
    """Fields with commas, quotes or lines in them are quoted, as they were when they were read."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(fields)
    return line.getvalue().removesuffix("\n")


def predict(model: Path, data: Path, *, probabilities: bool) -> tuple[list[str], dict[str, Any]]:
    """One line per example, and the predictions' quality if the data has labels."""
    arrays = _read_model(model)
    if ("user_factors" in arrays) != (data.suffix == ".csv"):
        kind = "ratings, and needs a .csv file" if "user_factors" in arrays else "rows, and needs svmlight or .npz"
        raise UsageError(f"{model} is a model of {kind}, not {data}.")
    if probabilities and str(arrays.get("loss", "")) != "log_loss":
        raise UsageError(f"--probabilities needs a classifier of logistic loss; {model} is not one.")
    if "user_factors" in arrays:
        held = read_ratings(data)
        found, wanted = _rate(arrays, held)
        entries: Any = held.matrix.tocoo()
        lines = [
            _csv_line(str(held.users[user]), str(held.items[item]), f"{value:.6g}")
            for user, item, value in zip(entries.row, entries.col, found, strict=True)
        ]
        error = _rmse(found, wanted)
        return lines, {"examples": len(lines), **({} if error is None else {"rmse": error})}
    X, y = read_labelled(data, features=arrays["coef"].shape[1], labels=False)
    if X.shape[1] != arrays["coef"].shape[1]:
        raise UsageError(f"{data} has {X.shape[1]} features, but the model has {arrays['coef'].shape[1]}.")
    scores = _scores(arrays, X)
    if "classes" not in arrays:
        return [f"{value:.6g}" for value in scores[:, 0]], {"examples": len(y), **_measures(arrays, X, y)}
    classes = arrays["classes"]
    if probabilities:
        chances = 1 / (1 + np.exp(-scores))
        chances = np.column_stack([1 - chances, chances]) if chances.shape[1] == 1 else chances
        chances /= chances.sum(axis=1, keepdims=True)
        lines = [" ".join(f"{value:.6g}" for value in row) for row in chances]
    else:
        lines = [_word(label) for label in _picked(classes, scores).tolist()]
    known = np.isin(y, classes).all()
    return lines, {"examples": len(y), **(_measures(arrays, X, y) if known else {})}
