"""`paceline sparse`: linear models and ratings by Hogwild! on all cores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.console import out, print_json, say, verbs
from paceline.errors import UsageError, printable
from paceline.specs.bounds import PASSES, PROCESSORS, SPARSE_SEED
from paceline.system import files
from paceline.system.paths import check_new_file

sparse = verbs("Fit sparse linear models and ratings on all cores, and predict with them.", no_args_is_help=True)

# Options that mean something for one kind of data only.
_LINEAR, _RATINGS = {"loss", "penalty", "learning_rate", "discipline"}, {"rank"}

_LOSSES = {"logistic": "log_loss", "squared": "squared_error"}

Data = Annotated[Path, typer.Argument(help="svmlight/libsvm text, .npz, or .csv of user,item,rating")]


@sparse.command()
def fit(
    context: typer.Context,
    data: Data,
    loss: Annotated[
        str, typer.Option(help="logistic, hinge, squared-hinge, perceptron, ...; for regression: squared, huber, ...")
    ] = "logistic",
    penalty: Annotated[str, typer.Option(help="l2, l1, elasticnet or none")] = "l2",
    alpha: Annotated[float | None, typer.Option(help="Weight of the penalty; default 1e-4, ratings 1.0")] = None,
    learning_rate: Annotated[
        str, typer.Option(help="optimal, constant, invscaling, adaptive, decay, adagrad")
    ] = "optimal",
    eta0: Annotated[float | None, typer.Option(help="Initial learning rate; default 0.01, ratings 0.05")] = None,
    passes: Annotated[int, typer.Option(help="Maximum passes over the data.")] = 20,
    tol: Annotated[float | None, typer.Option(help="Stop if 5 passes improve by less; default: never")] = None,
    rank: Annotated[int, typer.Option(help="Rank of the factors, for ratings.")] = 10,
    n_jobs: Annotated[int, typer.Option(help="Number of threads; -1: all cores.")] = -1,
    seed: Annotated[int, typer.Option(help="Random seed of the order of examples.")] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Identical results for any --n-jobs, without speed-up.")
    ] = False,
    discipline: Annotated[
        str, typer.Option(help="How threads share the weights: copies, or shared as in the paper")
    ] = "copies",
    test: Annotated[Path | None, typer.Option(help="Test data; default: the training data.")] = None,
    model: Annotated[Path | None, typer.Option(help="Model file to write (.npz)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON as the last line of stdout.")] = False,
) -> None:
    """Fit a model, and report loss, speed, sparsity, and whether threads paid.

    Example: paceline sparse fit data.svm --loss logistic --n-jobs 2 --json
    """
    from paceline.integrations import sparse_jobs as jobs

    if model is not None and model.suffix != ".npz":
        raise UsageError(f"--model {model} must end with .npz.")
    if model is not None:
        check_new_file(model, f"--model {model}")
    SPARSE_SEED.check("--seed", seed)
    PASSES.check("--passes", passes)
    if n_jobs > 0:
        PROCESSORS.check("--n-jobs", n_jobs)
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if strange := sorted(given & (_LINEAR if data.suffix == ".csv" else _RATINGS)):
        kind, other = ("linear models", "ratings") if data.suffix == ".csv" else ("ratings", "linear models")
        raise UsageError(f"--{strange[0].replace('_', '-')} is for {kind}, and {data} is for {other}; leave it out.")
    if eta0 is not None and learning_rate == "optimal" and data.suffix != ".csv":
        raise UsageError(
            "--eta0 has no effect with --learning-rate optimal; choose another, such as constant or decay."
        )
    common: dict[str, Any] = {
        "n_jobs": n_jobs, "random_state": seed, "deterministic": deterministic, "max_iter": passes, "tol": tol,
    }  # fmt: skip

    def progress(number: int, done: Any) -> None:
        say(f"Pass {number} of {passes}: mean loss {done.loss:.5f}, {done.examples / done.seconds:,.0f} examples/s")

    if data.suffix == ".csv":
        result, arrays = jobs.fit_ratings(
            data, test, progress, n_components=rank, **common, **_given(alpha=alpha, eta0=eta0)
        )
    else:
        name = loss.replace("-", "_")
        result, arrays = jobs.fit_linear(
            data, test, progress, loss=_LOSSES.get(name, name), penalty=None if penalty == "none" else penalty,
            learning_rate=learning_rate, discipline=discipline, **common, **_given(alpha=alpha, eta0=eta0),
        )  # fmt: skip
    if model is not None:
        jobs.write_model(model, arrays)
        result["model"] = str(model)
    _show(result, as_json)


@sparse.command()
def predict(
    model: Annotated[Path, typer.Argument(help="Model file from `paceline sparse fit --model`")],
    data: Data,
    write: Annotated[
        Path | None, typer.Option("--out", help="Output file, one prediction per line; default stdout")
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Print class probabilities (logistic loss).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print measures as JSON on the last line of stdout.")] = False,
) -> None:
    """Predict with a model, one line per example.

    Example: paceline sparse predict model.npz data.svm --out predictions.txt
    """
    from paceline.integrations import sparse_jobs as jobs

    if write is not None:
        check_new_file(write, f"--out {write}")
    lines, measures = jobs.predict(model, data, probabilities=probabilities)
    if write is None:
        if not as_json:
            print("\n".join(printable(line) for line in lines))
    else:
        files.write_text(write, "\n".join(lines) + "\n")
    if as_json:
        print_json(measures)
    elif measures:
        say(", ".join(f"{name} {value:.5g}" for name, value in measures.items() if name != "examples"))


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    from paceline.observe.document import Cell, Table
    from paceline.observe.terminal import terminal_table

    rows = [
        (name.replace("_", " "), f"{value:,.5g}" if isinstance(value, float) else str(value))
        for name, value in result.items()
        if value is not None
    ]
    out().print(terminal_table(Table(rows, [Cell(one, kind="name") for one in ("What", "Measured")])))
