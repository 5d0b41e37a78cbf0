"""A study's folder: what is in it, and how a trial gets there so that a kill at any instant costs at most that trial."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.observe.run import write_json, write_text
from paceline.study.study_file import Study
from paceline.study.trial import Trial
from paceline.system import machine, versions

__all__ = ["StudyFolder"]

_UNFINISHED = ".unfinished-"


class StudyFolder:
    """`study.toml`, `environment.json`, `plan.json`, `trials/<hash>/`, the tables and the report.

    A trial is written into a folder with another name, brought to the disk, and renamed: a folder named by a hash is complete.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials = path / "trials"

    def check(self) -> None:
        """Refuses a folder that holds something else, before anything is run.

        Raises:
            UsageError: it does.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; name a folder with --out.")
        if not self.path.is_dir() or (self.path / "study.toml").is_file():
            return
        if any(
            path != self.trials and not path.name.startswith(".") for path in self.path.iterdir()
        ):  # not from a kill
            raise UsageError(f"{self.path} is not empty, and holds no study; choose another folder with --out.")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lets nobody else run trials in this folder; the system ends it with the process, however that ends.

        Raises:
            UsageError: somebody does.
        """
        self.trials.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UsageError(f"Another process runs the study in {self.path}; wait for it, or end it.") from error
            yield

    def begin(self, study: Study) -> None:
        """Writes down what is about to be run, and removes what a kill has left of a trial or a file."""
        for path in self.path.glob(".*.tmp"):
            path.unlink()
        write_text(self.path / "study.toml", study.as_text())
        write_json(self.path / "environment.json", {"machine": machine(), "versions": versions()})
        for path in self.trials.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path)

    def write_plan(self, trials: Mapping[str, Trial]) -> None:
        """Which trials belong to the study, in their order."""
        write_json(self.path / "plan.json", [{"hash": name, "factors": one.factors} for name, one in trials.items()])

    def plan(self) -> list[dict[str, Any]]:
        """What `write_plan` wrote; empty before that."""
        return _read(self.path / "plan.json") or []

    def done(self, name: str) -> bool:
        """Whether a trial has been run."""
        return (self.trials / name).is_dir()

    def finished(self) -> list[str]:
        """The hashes of all trials in the folder, whether they belong to the study as it is or not."""
        return sorted(path.name for path in self.trials.glob("[0-9a-f]*") if path.is_dir())

    def add(self, name: str, write: Callable[[Path], None]) -> None:
        """Puts a trial into the folder, whose files `write` writes: all of them, or nothing."""
        unfinished = self.trials / f"{_UNFINISHED}{name}"
        unfinished.mkdir()
        write(unfinished)
        for path in [*unfinished.iterdir(), unfinished]:
            _to_disk(path)
        unfinished.rename(self.trials / name)
        _to_disk(self.trials)

    def trial(self, name: str) -> dict[str, Any]:
        """A trial's `trial.json`.

        Raises:
            UsageError: it is damaged, or gone.
        """
        path = self.trials / name / "trial.json"
        if (found := _read(path)) is None:
            raise UsageError(f"{path} is missing; remove its trial's folder, and run the study again.")
        return found

    def result(self, name: str) -> dict[str, Any]:
        """A trial's `result.json`."""
        return _read(self.trials / name / "result.json") or {}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(f"{path} is damaged ({error}); remove its trial's folder, and run the study again.") from error


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
