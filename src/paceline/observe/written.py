"""Writing a finished run's folder: records, trace, report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import NotWrittenError
from paceline.observe.report import write_report
from paceline.observe.trace import write_trace
from paceline.records.run_data import RunData, write_json

__all__ = ["write_run"]


def write_run(
    run: RunData,
    folder: Path,
    *,
    title: str,
    command: str,
    recorded: Mapping[int, np.ndarray] | None = None,
    max_traced_steps: int = 10_000,
    max_traced_workers: int = 256,
    host: dict[str, Any] | None = None,
) -> None:
    """Write the folder of a finished run.

    Args:
        run: for the trace and the report.
        folder: created if missing.
        title: of the report.
        command: for the report.
        recorded: the records to save, if they are not the run's.
        max_traced_steps: of each worker.
        max_traced_workers: the first ones.
        host: for `host.json`, of a simulation: facts that depend on where and when it ran.

    Raises:
        NotWrittenError: a file cannot be written: the measurements, in which case the folder is like that of a killed run, or
            only the trace or the report. The error's `run` is this one.
    """
    try:
        (run if recorded is None else dataclasses.replace(run, records=dict(recorded))).save(folder)
        failed = None
        for write in (
            lambda: write_json(folder / "host.json", host) if host is not None else None,
            lambda: write_trace(
                run, folder / "trace.json", max_steps_per_worker=max_traced_steps, max_workers=max_traced_workers
            ),
            lambda: write_report([run], folder / "report.html", title=title, command=command),
        ):
            try:
                write()
            except NotWrittenError as error:
                failed = failed or error
        if failed is not None:
            raise failed
    except NotWrittenError as error:
        error.run = run
        raise
