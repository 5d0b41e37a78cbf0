"""A study's folder, in which a kill at any time loses at most the running trial."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import NotWrittenError, UsageError
from paceline.records.run_data import write_json
from paceline.study.study_file import Study
from paceline.study.trial import Trial
from paceline.system import files
from paceline.system.folder_lock import locked
from paceline.system.machine import machine, versions

_UNFINISHED = ".unfinished-"
_SUMS = "SHA256SUMS"  # of a trial's files, as sha256sum --check reads it
_REMEDY = "remove its trial's folder, and run the study again"
_HASH = re.compile(r"[0-9a-f]+", re.ASCII)


class StudyFolder:
    """`study.toml`, `environment.json`, `plan.json`, `trials/<hash>/`, the tables and the report.

    A trial is written into a temporary folder, synced to disk and renamed, so a folder named by a hash is complete. Checksums
    of its files are in SHA256SUMS; folders of earlier versions lack it, and are read without a check.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials = path / "trials"

    def check(self) -> None:
        """Raises an error if the folder contains something other than a study."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; name a folder with --out.")
        if not self.path.is_dir() or (self.path / "study.toml").is_file():
            return
        # A kill can leave these.
        if any(path != self.trials and not path.name.startswith(".") for path in self.path.iterdir()):
            raise UsageError(f"{self.path} is not empty and contains no study; choose another folder with --out.")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Locks the folder against other studies; the lock ends with the process.

        Raises:
            UsageError: another process holds the lock.
        """
        with locked(self.path):
            with files.writing(self.path):
                self.trials.mkdir(exist_ok=True)
            yield

    def begin(self, study: Study) -> None:
        """Writes the study and its environment, and removes what an interrupted trial left."""
        files.write_text(self.path / "study.toml", study.as_text())
        write_json(self.path / "environment.json", {"machine": machine(), "versions": versions()})
        with files.writing(self.trials):
            for path in self.trials.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(path)

    def write_plan(self, trials: Mapping[str, Trial]) -> None:
        write_json(self.path / "plan.json", [{"hash": name, "factors": one.factors} for name, one in trials.items()])

    def plan(self) -> list[dict[str, Any]]:
        """The plan from `write_plan`, empty before that; raises `UsageError` if it is damaged."""
        path = self.path / "plan.json"
        plan = files.read_json(path, [])
        if not all(
            isinstance(one, dict)
            and isinstance(one.get("factors"), dict)
            and _HASH.fullmatch(str(one.get("hash")))
            and all(value is None or isinstance(value, str | int | float) for value in one["factors"].values())
            for one in plan
        ):
            raise UsageError(f"{path} is damaged: it is not a list of trials; run the study again.")
        return plan

    def done(self, name: str) -> bool:
        return (self.trials / name).is_dir()

    def finished(self) -> list[str]:
        """The hashes of all trials in the folder, including those of earlier versions of the study."""
        return sorted(path.name for path in self.trials.glob("[0-9a-f]*") if path.is_dir())

    def add(self, name: str, write: Callable[[Path], None]) -> None:
        """Adds a trial, whose files `write` writes, completely or not at all."""
        unfinished = self.trials / f"{_UNFINISHED}{name}"
        try:
            with files.writing(unfinished):
                unfinished.mkdir()
                write(unfinished)
                sums = [f"{files.digest_of(path)}  {path.name}\n" for path in sorted(unfinished.iterdir())]
                files.write_text(unfinished / _SUMS, "".join(sums))
                files.to_disk(unfinished)
                unfinished.rename(self.trials / name)
                files.to_disk(self.trials)
        except NotWrittenError:
            shutil.rmtree(unfinished, ignore_errors=True)  # frees space, which is probably short
            raise

    def trial(self, name: str) -> dict[str, Any]:
        """A trial's `trial.json`; raises `UsageError` if it is damaged, or gone."""
        path = self.trials / name / "trial.json"
        if (found := _read(path)) is None:
            raise UsageError(f"{path} is missing; {_REMEDY}.")
        return found

    def result(self, name: str) -> dict[str, Any]:
        """A trial's `result.json`; raises `UsageError` if it is damaged."""
        return _read(self.trials / name / "result.json") or {}


def _read(path: Path) -> Any:
    """The content of a trial's JSON file; None if the file never existed."""
    try:
        listed = path.with_name(_SUMS)
        lines = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
        sums = dict(line.split("  ")[::-1] for line in lines)
        if sums and sums.get(path.name) != files.digest_of(path):
            raise ValueError(f"its checksum does not match {_SUMS}")
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is not an object of names and values")
        return found
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({error}); {_REMEDY}.") from error
