"""Estimates how long a study will take, from its finished trials or from a few measured steps."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.advice.calibration.probes import steps
from paceline.study.design import plan_trials
from paceline.study.folder import StudyFolder
from paceline.study.runner import Pace
from paceline.study.study_file import Study
from paceline.study.trial import Trial, TrialMaker
from paceline.system.machine import num_cores
from paceline.tasks.base import keep_data
from paceline.tasks.load import load_task

_START_S = 0.4  # of real workers with a running fork server, including the final evaluation
_SIMULATED_START_S = 0.01
_SIMULATED_STEP_S = 60e-6  # without gradients
_GRADIENTS = 5


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The trials that a study would run."""

    trials: tuple[Trial, ...]  # in order; empty for a search, whose trials are not known in advance
    total: int
    done: frozenset[str]  # hashes of trials that have been run
    remaining_s: float
    reason: str
    notes: tuple[str, ...]  # sentences on settings that were changed so that trials can run


def estimate(study: Study, folder: Path) -> Forecast:
    """The trials that a folder lacks, and how long they will take; runs at most a few steps.

    Trials end early if they reach their target, so without earlier trials the time is an upper bound.
    """
    store = StudyFolder(folder)
    store.check()
    if study.design.kind == "optuna":
        trials, notes = (), ()
        example = TrialMaker(study).make(study.centre, study.seeds[0])
        total = (study.design.trials or 0) * len(study.seeds)
    else:
        trials, notes = plan_trials(study)
        example, total = trials[0], len(trials)
    done = {trial.hash for trial in trials if store.done(trial.hash)}
    waiting = [trial for trial in trials if trial.hash not in done]
    pace = Pace()
    for trial in trials:
        if trial.hash in done:
            pace.took(trial, store.trial(trial.hash).get("host_s"))
    remaining_s, reason = pace.remaining_s(waiting, len(waiting)), "from the trials that have been run"
    if remaining_s is None:
        with keep_data():
            known = list(map(_costs(study), waiting or [example]))
        remaining_s = statistics.fmean(known) * (total - len(done))
        reason = "at most, from the time of a few gradients"
    return Forecast(
        trials=trials, total=total, done=frozenset(done), remaining_s=remaining_s, reason=reason, notes=notes
    )


def _costs(study: Study) -> Callable[[Trial], float]:
    """Estimates a trial's seconds from the time of a few gradients on this machine."""
    task = load_task(study.task)

    @functools.cache
    def train_set() -> Any:
        return task.load(study.data)[0]

    @functools.cache
    def gradient_s(batch_size: int) -> float:
        rows = steps(task, train_set(), min(batch_size, len(train_set())), at_least=_GRADIENTS, for_s=0.0)
        return float(np.median(rows["ended_s"] - rows["started_s"]))

    def seconds(trial: Trial) -> float:
        config = trial.config
        assert config.batch_size is not None
        if config.steps is not None:
            gradients = config.steps * config.workers
        else:
            assert config.epochs is not None
            gradients = config.epochs * len(train_set()) / config.batch_size
        each_s = 0.0 if trial.timing_only else gradient_s(config.batch_size)
        if config.backend == "simulator":
            return _SIMULATED_START_S + gradients * (each_s + _SIMULATED_STEP_S)
        training_s = gradients * each_s / min(config.workers, num_cores())
        return _START_S + min(training_s, training_s if config.limit_s is None else config.limit_s)

    return seconds
