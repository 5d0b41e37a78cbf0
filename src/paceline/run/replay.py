"""Repeats a recorded run of real workers in one process, with every gradient computed again."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from paceline.errors import UsageError
from paceline.records import checkpoint_contents, checkpoint_files
from paceline.run.inputs import source_digest, source_of
from paceline.run.loop_replay import LoopReplay
from paceline.run.recorded_order import ReplayMismatchError
from paceline.run.repetition import Recorded, Repetition, Update
from paceline.run.task_replay import TaskReplay
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


class RecordedRun(Recorded):
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
