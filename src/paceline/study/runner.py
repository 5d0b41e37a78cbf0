"""Runs a study's trials one after the other, each once, even with interruptions."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import OverrideWarning, PacelineError
from paceline.observe.words import counted
from paceline.records.run_data import RunData, write_json
from paceline.run.simulate_task import simulate_task
from paceline.run.train import train
from paceline.study.design import plan_trials, search
from paceline.study.folder import StudyFolder
from paceline.study.study_file import TARGETS, Study
from paceline.study.table import check_installed, crossings, flat_row, per_step, write_tables
from paceline.study.trial import Trial
from paceline.system.interrupts import ended_by_system, noted
from paceline.system.machine import machine, versions
from paceline.tasks.base import keep_data
from paceline.tasks.load import load_task

_PROGRESS_EVERY_S = 0.2
_ELSEWHERE = "{} ran on another machine or with other versions: see the table's environment columns."


@dataclass(frozen=True, kw_only=True)
class StudyProgress:
    """A study's progress after a trial."""

    done: int  # trials that have been run, now or earlier
    total: int
    remaining_s: float | None  # estimate from the trials so far; None before the first
    trial: Trial  # the last trial, which had `outcome` and took `took_s` on this machine
    outcome: str
    took_s: float


@dataclass(kw_only=True)
class StudyEnd:
    """The state of a study after it has run."""

    folder: Path
    ran: int = 0  # trials run now
    found: int = 0  # trials that had been run before
    #: Hashes of trials in the folder that no longer belong to the study; they are kept, but not in the table.
    left_out: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)  # of all trials
    notes: tuple[str, ...] = ()  # sentences for the user


def run_study(
    study: Study, folder: Path | str, *, on_progress: Callable[[StudyProgress], None] | None = None
) -> StudyEnd:
    """Runs the trials of a study that this folder lacks, and writes its table.

    May be killed at any time and called again: complete trials are kept, and the interrupted one runs again. A trial that
    diverges or crashes is a result. If the study has changed, only its new trials run. Adds about 10 ms to each trial.
    Simulated trials run in this process.

    Args:
        study: the study.
        folder: for its trials; created if missing.
        on_progress: called after trials, at most a few times a second.

    Raises:
        UsageError: the study cannot run; no trial has started.
    """
    return _Running(study, StudyFolder(Path(folder)), on_progress).run()


class _Running:
    def __init__(self, study: Study, folder: StudyFolder, on_progress: Callable[[StudyProgress], None] | None) -> None:
        self.study = study
        self.folder = folder
        self.on_progress = on_progress
        self.end = StudyEnd(folder=folder.path)
        self.planned: dict[str, Trial] = {}
        self.handled: set[str] = set()
        self.elsewhere = 0  # trials found that were run on another machine, or with other versions
        self.pace = Pace()
        self.told_s = -math.inf
        self.environment = {"versions": versions(), "machine": machine()}
        self.targets = sorted({*study.targets, *TARGETS}, reverse=True)

    def run(self) -> StudyEnd:
        check_installed()
        self.folder.check()
        trials, total = self._trials()
        with keep_data(), warnings.catch_warnings():
            warnings.simplefilter("ignore", OverrideWarning)  # the caller has shown it once
            if self.study.parameters is None or self.study.limits.steps is None:
                load_task(self.study.task).load(self.study.data)  # missing data cause an error before the first trial
            with ended_by_system(), noted() as interruption, self.folder.held():
                self.folder.begin(self.study)
                self.folder.write_plan(self.planned)
                try:
                    for trial in trials:
                        interruption.raise_if_any()
                        self._one(trial, total)
                except KeyboardInterrupt:
                    write_tables(self.folder.path)
                    raise
                self.end.left_out = sorted(set(self.folder.finished()) - set(self.planned))
                if self.elsewhere:
                    self.end.notes += (_ELSEWHERE.format(counted(self.elsewhere, "earlier trial")),)
                write_tables(self.folder.path)
        return self.end

    def _trials(self) -> tuple[Iterable[Trial], int]:
        if self.study.design.kind == "optuna":
            assert self.study.design.trials is not None
            return search(self.study, self._measure), self.study.design.trials * len(self.study.seeds)
        trials, self.end.notes = plan_trials(self.study)
        self.planned = {trial.hash: trial for trial in trials}
        return trials, len(trials)

    def _one(self, trial: Trial, total: int) -> None:
        name = trial.hash
        if name not in self.planned:  # a search has just chosen it
            self.planned[name] = trial
            self.folder.write_plan(self.planned)
        if name in self.handled:
            return
        self.handled.add(name)
        found = self.folder.done(name)
        if not found:
            self._add(trial)
        about = self.folder.trial(name)
        self.end.found += found
        self.end.ran += not found
        self.end.outcomes[about["outcome"]] += 1
        self.elsewhere += about.get("environment") != self.environment
        self.pace.took(trial, about.get("host_s"))
        if not found:
            self._tell(trial, about, total)

    def _add(self, trial: Trial) -> None:
        began_s = time.monotonic()
        run = _run(trial)
        failed = run.result["outcome"] in ("diverged", "crashed")
        about = {
            "hash": trial.hash,
            "number": len(self.handled) - 1,
            "factors": dict(trial.factors),
            "outcome": run.result["outcome"],
            "reason": run.result.get("outcome_reason") or "",
            "step": run.result.get("steps") if failed else None,
            "reached": crossings(run, self.targets),
            "per_step": per_step(run),
            "host_s": time.monotonic() - began_s,
            "environment": self.environment,
        }
        kept = run if self.study.keep_events else dataclasses.replace(run, records={})

        def write(path: Path) -> None:
            kept.save(path)
            write_json(path / "trial.json", about)

        self.folder.add(trial.hash, write)

    def _tell(self, trial: Trial, about: dict[str, Any], total: int) -> None:
        done, now_s = self.end.ran + self.end.found, time.monotonic()
        if self.on_progress is None or (now_s - self.told_s < _PROGRESS_EVERY_S and done < total):
            return
        self.told_s = now_s
        waiting = [one for name, one in self.planned.items() if name not in self.handled]
        remaining_s = self.pace.remaining_s(waiting, total - done)
        self.on_progress(
            StudyProgress(
                done=done, total=max(total, done), remaining_s=remaining_s, trial=trial, outcome=about["outcome"],
                took_s=about["host_s"],
            )
        )  # fmt: skip

    def _measure(self, trials: list[Trial]) -> float | None:
        """The median of the design's measure over a combination's seeds; None if most trials have none."""
        assert self.study.design.measure is not None
        values = []
        for trial in trials:
            about, result = self.folder.trial(trial.hash), self.folder.result(trial.hash)
            row = flat_row(about, result, self.study)
            if self.study.design.measure not in row:
                known = ", ".join(name for name, value in row.items() if isinstance(value, int | float))
                raise PacelineError(f"No trial measures '{self.study.design.measure}'. Known: {known}.")
            values.append(row[self.study.design.measure])
        known = [value for value in values if isinstance(value, int | float)]
        return statistics.median(known) if len(known) * 2 > len(values) else None


class Pace:
    """Estimates how long trials take from those that have been run."""

    def __init__(self) -> None:
        self._by_setting: dict[Any, list[float]] = {}

    def took(self, trial: Trial, seconds: float | None) -> None:
        if seconds is not None:
            self._by_setting.setdefault(trial.setting, []).append(seconds)

    def remaining_s(self, waiting: Iterable[Trial], number: int) -> float | None:
        """The remaining time: for each trial the mean time of its repetitions, or else the median over all settings.

        A median, because the first trial takes seconds longer, until the fork server has loaded PyTorch.
        """
        if not self._by_setting:
            return None
        means = {setting: statistics.fmean(times) for setting, times in self._by_setting.items()}
        overall = statistics.median(means.values())
        known = [means.get(trial.setting, overall) for trial in waiting]
        return sum(known) + overall * max(0, number - len(known))


def _run(trial: Trial) -> RunData:
    """Runs a trial; an error becomes its result."""
    try:
        if trial.cluster is None:
            return train(trial.config)
        return simulate_task(
            trial.config, cluster=trial.cluster, timing_only=trial.timing_only, num_parameters=trial.parameters
        )
    except (Exception, SystemExit) as error:
        if _came_of_an_interrupt(error):
            raise KeyboardInterrupt from error
        reason = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        config = {**dataclasses.asdict(trial.config), "data": None}
        keys = ("task", "algorithm", "workers", "backend", "seed", "batch_size")
        result = {key: config[key] for key in keys} | {"outcome": "crashed", "outcome_reason": reason}
        return RunData(config, {**result, "outcome_trace": traceback.format_exc()})


def _came_of_an_interrupt(error: BaseException | None) -> bool:
    """Whether this was raised while Ctrl-C was handled, so that it is no result."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
