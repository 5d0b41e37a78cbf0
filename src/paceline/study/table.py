"""A study as one flat table: a row for each trial, for pandas, Polars and spreadsheets."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError, first_line, shown
from paceline.study.folder import StudyFolder
from paceline.study.limits import is_number
from paceline.study.rows import flat_row
from paceline.study.study_file import TARGETS
from paceline.system import files
from paceline.system.plain_files import read_table

if TYPE_CHECKING:
    import pandas

__all__ = ["check_installed", "load_table", "write_tables"]


def check_installed() -> None:
    """Refuses to go on without what tables need."""
    for name in ("pandas", "pyarrow"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(f"Studies need {name}, which is not installed: pip install 'paceline[study]'.") from error


def load_table(folder: Path | str) -> pandas.DataFrame:
    """A study's table, one row per trial that has been run and belongs to the study as it is, in their order.

    Costs about 1 ms per trial. A study that is still being run has fewer rows. Where the trials' folders are not there, the
    written table is read, `table.parquet` or else `table.csv`.

    Columns: `trial` (hash), `number`, `factor.<name>` (`factor.seed` pairs the trials of different methods), `outcome`
    (converged, stopped, diverged, crashed), `reason`, `failed_step`, `wall_s`, `steps`, `samples`, `samples_per_s`, losses and
    accuracy, `time_to_<percent>_s` and `steps_to_<percent>` (NaN: not reached), `staleness_...`, every other measure of
    `result.json`, `host_s` (how long the trial took here) and `environment.<name>`.

    Raises:
        UsageError: it is no study's folder, or pandas is missing.
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
        with files.replacing(path / name) as file:  # `study table` may be asked while the study is run
            write(file, index=False)
    return table


def _rows(folder: StudyFolder) -> list[dict[str, Any]]:
    targets, target = _targets(folder.path / "study.toml")
    rows = []
    for number, planned in enumerate(folder.plan()):
        name = planned["hash"]
        if not folder.done(name):
            continue
        trial = {**folder.trial(name), "number": number, "factors": planned["factors"]}
        rows.append(flat_row(trial, folder.result(name), targets=targets, target=target, folder=folder.trials / name))
    return rows


def _targets(path: Path) -> tuple[list[float], float]:
    """The study's targets, and the one by which its methods are compared."""
    study = read_table(path, "The study file")
    targets = study.get("targets", list(TARGETS)) if isinstance(study, dict) else None
    if not isinstance(targets, list) or not targets or not all(map(is_number, targets)):
        raise UsageError(f"The study file {path} is damaged: its targets are no list of numbers.")
    target = study.get("target", min(targets))
    if target not in targets:
        raise UsageError(f"The study file {path} is damaged: its target {shown(target)} is none of its targets.")
    return targets, target


def _read_written(path: Path) -> pandas.DataFrame:
    import pandas

    try:
        if path.suffix == ".parquet":
            return pandas.read_parquet(path)
        return pandas.read_csv(path, dtype={"trial": str})
    except Exception as error:  # PyArrow and pandas raise what they like at damaged bytes
        raise UsageError(
            f"{path} is damaged ({first_line(error)}), and there are no trials to write it from."
        ) from error


def _frame(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Columns of one kind each: what has numbers and gaps is numbers and NaN; factors of several kinds are words."""
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
