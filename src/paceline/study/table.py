"""A study as one flat table: a row for each trial, for pandas, Polars and spreadsheets."""

from __future__ import annotations

import importlib
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.study.folder import StudyFolder
from paceline.study.rows import flat_row
from paceline.study.study_file import TARGETS

if TYPE_CHECKING:
    import pandas

__all__ = ["check_installed", "load_table", "write_tables"]


def check_installed() -> None:
    """Refuses to go on without what tables need.

    Raises:
        UsageError: with the command that installs it.
    """
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
    import pandas

    path = Path(folder)
    if (path / "plan.json").is_file() and (path / "trials").is_dir():
        return _frame(_rows(StudyFolder(path)))
    if (path / "table.parquet").is_file():
        return pandas.read_parquet(path / "table.parquet")
    if (path / "table.csv").is_file():
        return pandas.read_csv(path / "table.csv", dtype={"trial": str})
    raise UsageError(f"{path} holds no study: run one with `paceline study run FILE --out {path}`.")


def write_tables(folder: Path | str) -> pandas.DataFrame:
    """Writes `table.parquet` and `table.csv` from the trials, and returns the table."""
    table, path = load_table(folder), Path(folder)
    for name, write in (("table.parquet", table.to_parquet), ("table.csv", table.to_csv)):
        temporary = path / f".{name}.{os.getpid()}.tmp"  # `study table` may be asked while the study is run
        write(temporary, index=False)
        temporary.replace(path / name)
    return table


def _rows(folder: StudyFolder) -> list[dict[str, Any]]:
    study = tomllib.loads((folder.path / "study.toml").read_text(encoding="utf-8"))
    targets = study.get("targets", TARGETS)
    target = study.get("target", min(targets))
    rows = []
    for number, planned in enumerate(folder.plan()):
        name = planned["hash"]
        if not folder.done(name):
            continue
        trial = {**folder.trial(name), "number": number, "factors": planned["factors"]}
        rows.append(flat_row(trial, folder.result(name), targets=targets, target=target, folder=folder.trials / name))
    return rows


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
