"""Repeats a recorded run of real workers in one process, with every gradient computed again."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from paceline.algorithms import registry
from paceline.errors import UsageError
from paceline.records import checkpoint_contents, checkpoint_files
from paceline.records.order import Process
from paceline.records.run_data import RunData
from paceline.run.config import TrainConfig
from paceline.run.inputs import source_digest, source_of
from paceline.run.loop_replay import LoopReplay
from paceline.run.recorded_order import ReplayMismatchError
from paceline.run.repetition import Repetition, Update
from paceline.run.replayable import Resumption, by_process, is_own_loop, obstacle, recorded_part, since_resumed
from paceline.run.resumed_start import ResumedStart
from paceline.run.task_replay import TaskReplay
from paceline.run.view_changes import ViewChanges
from paceline.simulator.cluster import Cluster
from paceline.system.machine import machine, versions


@dataclass(frozen=True)
class Replay:
    """A run that was repeated, and whose every step and parameter was equal.

    Attributes:
        updates: that were computed again.
        steps: of all workers.
        checkpoint: the number of the checkpoint, as in the name of its folder, whose parameters the replay has; None: the run
            has none after an update, or ended while its workers' own models had different numbers of updates.
        warnings: what differs between the run's machine and this one, or the file of its task or function and the present one.
        run: that was repeated.
    """

    updates: int
    steps: int
    checkpoint: int | None
    warnings: tuple[str, ...]
    run: RecordedRun = field(repr=False)

    def at(self, version: int) -> Update:
        """Repeats the run up to an update: as `RecordedRun.at`."""
        return self.run.at(version)

    def first(self, holds: Callable[[nn.Module], bool]) -> Update | None:
        """The first update after which `holds(model)` is true: as `RecordedRun.first`."""
        return self.run.first(holds)


def replay(run: str | Path, train: Callable[[], Any] | None = None, *, data: Path | None = None) -> Replay:
    """Repeats a recorded run in this process, with every gradient computed again, and compares it bit for bit.

    The functions of all workers run here, one at a time, in the recorded order, with the recorded batches. Each step is
    compared with its record (batch, samples, versions, loss), and the parameters with those of the run's newest checkpoint.
    Costs: all gradients, one after the other; a model and an optimizer per worker.
    Not: `RecordedRun`, which repeats nothing before it is asked to, so that `at` can look at a run that differs later.

    Args:
        run: its folder.
        train: the function that `launch` called; None: it is a run of `train` or `paceline train`.
        data: folder with data sets, of a run of `train`; None: the run's own.

    Returns:
        What was equal; its `at(update)` opens the state after an update.

    Raises:
        ReplayMismatchError: a step differs from its record, or the parameters from the checkpoint's; the message names the
            update, the step and the worker. A function that draws random numbers without seeds, or uses different data than
            the run, differs at its first such step.
        UsageError: the folder holds no run, or one that cannot be replayed; the message says why.
    """
    recorded = RecordedRun(run, data, train=train)
    try:
        return recorded.replay()
    except ReplayMismatchError as error:
        text = " ".join((str(error), *recorded.warnings()))
        raise ReplayMismatchError(text, error.version, error.worker_id) from None


class RecordedRun:
    """A run of `train`, or of one's own loop under `launch`, that can be replayed, any number of times.

    The order in which workers read and updated the parameters is all that timing decides, and the records have it. In a replay
    the workers' own programs run in that order, one at a time, and each step is compared with its record.

    Costs: a replay takes the time of all gradients, one after the other.

    Args:
        folder: the run's.
        data: folder with data sets; None: the run's own.
        train: of a run of `launch`, the function that it called; None: it is a run of `train`.

    Raises:
        UsageError: the folder holds no run, or one that cannot be replayed; the message says why.
    """

    def __init__(self, folder: str | Path, data: Path | None = None, *, train: Callable[[], Any] | None = None) -> None:
        self.folder = Path(folder)
        whole = RunData.load(self.folder)
        run = since_resumed(whole)
        last = max((int(rows["incarnation"].max(initial=0)) for rows in run.records.values()), default=0)
        if last > run.result.get("restarts", 0):
            raise UsageError(f"{folder} is damaged: its events have more restarts of a worker than its result.")
        if why := obstacle(whole):
            raise UsageError(f"{folder} cannot be replayed: {why}.")
        self.algorithm = registry.build(whole.config["algorithm"])
        run, _ = recorded_part(whole, self.algorithm)
        is_own = is_own_loop(run)
        if is_own and train is None:
            called = run.config["task"] if run.config["task"].isidentifier() else "your function"
            raise UsageError(
                f'{folder} is a run of your own loop: replay it in Python, with paceline.replay("{folder}", {called}).'
            )
        if not is_own and train is not None:
            raise UsageError(f"{folder} is a run of paceline train, whose loop is Paceline's: leave out your function.")
        if is_own and not callable(train):
            raise UsageError(f"train is the function that launch called, not {train!r}.")
        if is_own and data is not None:
            raise UsageError("data is for runs of paceline train: your function loads its own, so leave it out.")
        self.train, self.part, self.is_cut = train, run, _may_be_cut(run)
        own = {one.name: run.config[one.name] for one in dataclasses.fields(TrainConfig) if one.name in run.config}
        here = {"data": data or own.get("data"), "placement": "first-touch", "slow": None}
        goals = dict.fromkeys(("target_loss", "target_accuracy", "target_fraction", "limit_s"))  # records have the end
        self.config, self.changes = TrainConfig(**{**own, **here, **goals}), ViewChanges.of(run)
        # Rounds with deaths are in the machine's memory, as in the run.
        self.cluster = Cluster(workers=self.config.workers, collective="memory" if self.changes else None)
        resumed = Resumption.of(run)
        self.start = ResumedStart(self.folder / resumed.checkpoint, self.algorithm) if resumed.checkpoint else None
        taken = self.start.taken if self.start is not None and self.algorithm.lockstep else 0
        self.num_rounds = taken + max(int(rows["step"].max(initial=0)) for rows in run.records.values())
        self.processes = by_process(run.records)
        self.applied = np.concatenate([rows["applied_version"] for rows in run.records.values()])
        # When each update of a worker's own model was recorded, its process, and the version that it made.
        self._of_own_models: list[tuple[float, Process, int]] = []
        self.first_update = 1 + resumed.version
        self.updates = int(self.applied.max())
        if self.algorithm.gossip and not self.algorithm.lockstep:  # versions count averages, too
            for worker, order in run.order.items():  # a last process may have copied a model, and made no step
                for incarnation in range(1 + int(order["incarnation"].max())):
                    self.processes.setdefault((worker, incarnation), run.records[worker][:0])
            self._of_own_models = sorted(
                (ended_s, (worker, incarnation), version)
                for worker, rows in whole.records.items()
                for ended_s, incarnation, version in rows[["ended_s", "incarnation", "applied_version"]].tolist()
                if version > 0
            )
            self.updates = len(self._of_own_models)
            self.first_update = 1 + self.updates - int(np.count_nonzero(self.applied))

    def warnings(self) -> tuple[str, ...]:
        """A sentence on each reason why the replay can differ: other releases, another processor, a changed task file."""
        result = self.part.result
        made_with = {**(result.get("versions") or {}), "processor": (result.get("machine") or {}).get("processor")}
        here = {**versions(), "processor": machine()["processor"]}
        found = [
            f"The run was made with {name} {before}, and this is {here[name]}, which can round otherwise."
            for name, before in made_with.items()
            if before is not None and here.get(name, before) != before
        ]
        what, script = self.train or self.config.task, (result.get("inputs") or {}).get("script")
        if script is not None and source_digest(what) not in (None, script):
            found.append(f"{source_of(what)} has changed since the run, which can compute otherwise.")
        return tuple(found)

    def _repetition(self, version: int | None, shards: Sequence[int] = (), **named: Any) -> Repetition:
        kind = TaskReplay if self.train is None else LoopReplay
        return kind(self, version, shards, **named)

    def replay(self) -> Replay:
        """Repeats the run.

        Raises:
            ReplayMismatchError: a step differs from its record, or the parameters from those of the checkpoint.
        """
        checkpoint, version, compared = checkpoint_files.newest_or_none(self.folder / "checkpoint"), None, None
        shards: Sequence[int] = ()
        if checkpoint is not None:
            checkpoint_files.check(checkpoint)
            version = checkpoint_contents.load_parameters(checkpoint).version
            shards = checkpoint_contents.shard_versions(checkpoint)
        simulation = self._repetition(version, shards)
        simulation.replay()
        if checkpoint is not None and simulation.compare_with(checkpoint):
            compared = int(checkpoint.name)
        return Replay(self.updates - self.first_update + 1, len(self.applied), compared, self.warnings(), self)

    def at(self, version: int) -> Update:
        """Repeats the run up to an update.

        If workers average in pairs, updates are counted over all workers, in the order of their records; the model is that of
        the worker that made the update.

        Raises:
            ReplayMismatchError: a step before it differs from its record.
            UsageError: the run has no such update, or each worker has its own model, averaged in rounds.
        """
        return self._up_to(version).update(version)

    def _up_to(self, version: int) -> Repetition:
        if self.algorithm.gossip and not self._of_own_models:
            raise UsageError("Each worker of this run has its own model and updates: replay the whole run.")
        if version not in range(self.first_update, self.updates + 1):
            raise UsageError(f"The run has updates {self.first_update:,} to {self.updates:,}, not {version:,}.")
        if self._of_own_models:
            made = self._of_own_models[self.first_update - 1 : version]
            newest = {process[0]: (process, made_version) for _, process, made_version in made}
            _, maker, own_version = made[-1]
            simulation = self._repetition(own_version, ends_there=True, maker=maker, others=dict(newest.values()))
        else:
            simulation = self._repetition(version, ends_there=True)
        simulation.replay()
        return simulation

    def first(
        self, holds: Callable[[nn.Module], bool], *, told: Callable[[int, bool], None] | None = None
    ) -> Update | None:
        """The first update after which `holds(model)` is true, if it stays true; None: it is not after the last one.

        If workers average in pairs, it is the first update after which it is true of any worker's model, taken after that
        worker's last update.

        Costs: log2 of the number of updates in replays, each up to another update.

        Args:
            holds: takes the model in training mode; must not change it.
            told: called with each update that was tried and the answer.

        Raises:
            ReplayMismatchError, UsageError: as for `at`.
        """
        found: list[Update] = []

        def is_true(version: int) -> bool:
            simulation = self._up_to(version)
            answer = simulation.any_model(holds)
            if told is not None:
                told(version, answer)
            if answer:
                found[:] = [simulation.update(version)]
            return answer

        if is_true(self.updates):
            bisect.bisect_left(range(self.first_update, self.updates), True, key=is_true)
        return found[0] if found else None


def _may_be_cut(run: RunData) -> bool:
    """Whether the run may have ended before its loops did; whether a time or a target loss has ended it is not recorded."""
    config, result, num_samples = run.config, run.result, run.config.get("limit_samples")
    return (
        result["outcome"] != "stopped"  # as after a target accuracy
        or bool(result["outcome_reason"])
        or (num_samples is not None and result["samples"] >= num_samples)
        or any(config.get(one) is not None for one in ("target_loss", "limit_s"))
    )
