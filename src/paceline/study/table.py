"""A study as one flat table: a row for each trial, for pandas, Polars and spreadsheets."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import UsageError, first_line
from paceline.records.run_data import RunData
from paceline.records.summary import LossCurve, loss_curve
from paceline.study.folder import StudyFolder
from paceline.study.study_file import Study, read_study
from paceline.system import files

if TYPE_CHECKING:
    import pandas

_IDENTIFYING = (
    "outcome",
    "outcome_reason",
    "outcome_trace",
    "seed",
    "task",
    "backend",
    "command",
    "machine",
    "versions",
)
_OWN_COLUMNS = ("time_to_fraction_s", "staleness", "time_to_target_s", "steps_to_target", "target_loss")
_FIRST = (
    "outcome", "reason", "failed_step", "wall_s", "steps", "samples", "samples_per_s", "initial_loss", "train_loss",
    "test_loss", "test_accuracy",
)  # fmt: skip


def check_installed() -> None:
    """Raises an error if the packages for tables are missing or incompatible with NumPy."""
    for name in ("pandas", "pyarrow"):
        try:
            importlib.import_module(name)
        except Exception as error:  # a release for another NumPy raises ImportError, ValueError or AttributeError
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                raise UsageError(
                    f"Studies need {name}, which is not installed: pip install 'paceline[study]'."
                ) from error
            raise UsageError(
                f"Studies need {name}, whose import fails ({first_line(error)}): install compatible releases, with pip "
                "install --upgrade numpy pandas pyarrow."
            ) from error


def load_table(folder: Path | str) -> pandas.DataFrame:
    """A study's table: one row per finished trial of the current study, in order.

    Takes about 1 ms per trial. If the trials' folders are missing, reads the written table: `table.parquet`, or else
    `table.csv`.

    Columns: `trial` (hash), `number`, `factor.<name>` (`factor.seed` pairs the trials of different methods), `outcome`
    (converged, stopped, diverged, crashed), `reason`, `failed_step`, `wall_s`, `steps`, `samples`, `samples_per_s`, losses and
    accuracy, `time_to_<percent>_s` and `steps_to_<percent>` (NaN: not reached), `staleness_...`, every other measure of
    `result.json`, `host_s` (how long the trial took here) and `environment.<name>`.

    Raises:
        UsageError: the folder contains no study, or pandas or PyArrow cannot be imported.
    """
    check_installed()
    path = Path(folder)
    if (path / "plan.json").is_file() and (path / "trials").is_dir():
        return _frame(_rows(StudyFolder(path)))
    for name in ("table.parquet", "table.csv"):
        if (path / name).is_file():
            return _read_written(path / name)
    raise UsageError(f"{path} holds no study: run one with `paceline study run FILE --out {path}`.")


def write_tables(folder: Path | str) -> pandas.DataFrame:
    """Writes `table.parquet` and `table.csv` from the trials, and returns the table."""
    table, path = load_table(folder), Path(folder)
    for name, write in (("table.parquet", table.to_parquet), ("table.csv", table.to_csv)):
        with files.replacing(path / name) as file:  # `study table` may run at the same time as the study
            write(file, index=False)
    return table


def _rows(folder: StudyFolder) -> list[dict[str, Any]]:
    study = read_study(folder.path / "study.toml")
    rows = []
    for number, planned in enumerate(folder.plan()):
        name = planned["hash"]
        if not folder.done(name):
            continue
        trial = {**folder.trial(name), "number": number, "factors": planned["factors"]}
        rows.append(flat_row(trial, folder.result(name), study, folder=folder.trials / name))
    return rows


def _read_written(path: Path) -> pandas.DataFrame:
    import pandas

    try:
        if path.suffix == ".parquet":
            return pandas.read_parquet(path)
        return pandas.read_csv(path, dtype={"trial": str})
    except Exception as error:  # PyArrow and pandas raise various exceptions for damaged bytes
        raise UsageError(
            f"{path} is damaged ({first_line(error)}), and the trials to write it again are missing."
        ) from error


def _frame(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Gives each column one type: numbers with gaps become numbers and NaN, mixed types become strings."""
    import pandas

    table = pandas.DataFrame(rows)
    for name in table.columns:
        kinds = {type(value) for value in table[name] if value is not None and value == value}
        if kinds <= {int, float} and kinds:
            table[name] = pandas.to_numeric(table[name])
            if table[name].dtype == object:  # whole numbers of more than 64 bits
                table[name] = table[name].astype("float64")
        elif not kinds:
            table[name] = table[name].astype("float64")
        elif len(kinds) > 1:
            table[name] = [None if value is None else _word(value) for value in table[name]]
    return table


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def target_name(percent: float) -> str:
    """A target in names of columns: 75, 2.5."""
    return f"{percent:g}"


def crossings(run: RunData, targets: Iterable[float]) -> dict[str, list[float] | None]:
    """For each target in percent of the initial loss: the seconds and steps after which the running loss first reached it."""
    initial_loss = run.result.get("initial_loss")
    if initial_loss is None or not math.isfinite(initial_loss) or not run.records:
        return {target_name(one): None for one in targets}
    curve = loss_curve(run.records, gossip=bool(run.result.get("gossip")))
    return {target_name(one): _crossing(curve, one / 100 * initial_loss) for one in targets}


def per_step(run: RunData) -> dict[str, float | None]:
    """Times of single steps, which `result.json` has only as shares.

    `gradient_s_median` and `apply_s_median` are of one gradient and one update; `lock_wait_s` is the total time that workers
    waited for locks, barriers and back-off.
    """
    rows = np.concatenate(list(run.records.values())) if run.records else None
    if rows is None or not len(rows):
        return dict.fromkeys(("gradient_s_median", "apply_s_median", "lock_wait_s"))
    return {
        "gradient_s_median": float(np.median(rows["gradient_ended_s"] - rows["gradient_started_s"])),
        "apply_s_median": float(np.median(rows["apply_s"])),
        "lock_wait_s": float(rows["wait_s"].sum()),
    }


def _crossing(curve: LossCurve, loss: float) -> list[float] | None:
    reached = np.flatnonzero(curve.average <= loss)
    return [float(curve.time_s[reached[0]]), int(curve.steps[reached[0]])] if len(reached) else None


def flat_row(
    trial: Mapping[str, Any], result: Mapping[str, Any], study: Study, *, folder: Path | None = None
) -> dict[str, Any]:
    """A trial's row.

    Args:
        trial: its `trial.json`.
        result: its `result.json`.
        study: for its targets, whose times the row has.
        folder: the trial's, for targets that it ran without; None: they count as not measured.
    """
    reached = dict(trial.get("reached") or {})
    new = [one for one in study.targets if target_name(one) not in reached]
    if new and folder is not None and any(folder.glob("events-*.jsonl")):
        reached |= crossings(RunData.load(folder), new)
    outcome = trial["outcome"]
    if outcome == "stopped" and reached.get(target_name(study.smallest_target)):
        outcome = "converged"
    row: dict[str, Any] = {"trial": trial["hash"], "number": trial["number"]}
    row |= {f"factor.{name}": level for name, level in trial["factors"].items()}
    row |= {"outcome": outcome, "reason": trial["reason"], "failed_step": trial["step"]}
    row |= {name: result.get(name) for name in _FIRST if name not in row}
    for one in study.targets:
        name = target_name(one)
        row[f"time_to_{name}_s"], row[f"steps_to_{name}"] = reached.get(name) or (None, None)
    row |= _staleness(result.get("staleness") or {})
    row |= trial.get("per_step") or {}
    for name, value in result.items():
        if name not in row and name not in _IDENTIFYING and name not in _OWN_COLUMNS:
            row |= _flat(name, value)
    row["host_s"] = trial.get("host_s")
    environment = trial.get("environment") or {}
    for part in ("versions", "machine"):
        row |= {f"environment.{name}": value for name, value in (environment.get(part) or {}).items()}
    return row


def _staleness(staleness: Mapping[str, Any]) -> dict[str, Any]:
    histogram = {int(value): count for value, count in (staleness.get("histogram") or {}).items()}
    own = {name: staleness.get(name) for name in ("mean", "max", "p50", "p95", "mean_after_gradient")}
    own["p90"] = quantile(histogram, 0.9) if histogram else None
    row = {f"staleness_{name}": value for name, value in own.items()}
    row["staleness_histogram"] = json.dumps({str(value): histogram[value] for value in sorted(histogram)})
    return row


def quantile(histogram: Mapping[int, int], share: float) -> int:
    """The smallest value that at least this share of a non-empty histogram does not exceed."""
    values = sorted(histogram)
    below = itertools.accumulate(histogram[value] for value in values)
    needed = share * sum(histogram.values()) * (1 - 1e-12)  # 0.95 of 60 may be a little above 57
    return next(value for value, number in zip(values, below, strict=True) if number >= needed)


def _flat(name: str, value: Any) -> dict[str, Any]:
    """A measure as cells: a short mapping gives one cell per entry; longer values become JSON."""
    if isinstance(value, Mapping):
        if all(one is None or isinstance(one, int | float | str) for one in value.values()) and len(value) <= 8:
            return {f"{name}_{key}": one for key, one in value.items() if not key.isdecimal()} or {
                name: json.dumps(value)
            }
        return {name: json.dumps(value)}
    return {name: json.dumps(value) if isinstance(value, list) else value}
