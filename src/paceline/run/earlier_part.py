"""The records and checkpoint of an earlier run, for the run that resumes it: validated before anything is changed."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.algorithms import Algorithm, spec
from paceline.algorithms.server.apply import ApplyRule
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.registries import apply_registry
from paceline.errors import NotWrittenError, UsageError
from paceline.model_parallel.graph.program import algorithm_named
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from paceline.records.event_counts import Groups, num_missing, versions_of
from paceline.records.run_data import RunData, check_records, save_events, write_config
from paceline.records.step_record import RECORD_DTYPE, shift_times
from paceline.records.summary import unrecorded
from paceline.run.spool import read_spool
from paceline.system import files

_SPOOL = re.compile(r"events-(0|[1-9]\d{0,8})\.bin", re.ASCII)
_ONE_EVENT_EACH = ("racing", "locked", "slots")  # kinds of memory in which each update has one gradient


@dataclass(frozen=True)
class EarlierPart:
    """A run's records up to its newest complete checkpoint; later updates are left out and recomputed."""

    run: RunData  # with the result's figures as they were at the checkpoint
    folder: Path | None = None  # the run's; None: there is no earlier part
    checkpoint: Path | None = None  # its folder
    saved: checkpoint.Parameters | None = None  # its shared part
    algorithm: Algorithm | None = None  # of the run at the checkpoint; None: unknown
    since: int = 0  # the version at which the run began to use that algorithm
    notes: tuple[str, ...] = ()  # problems that do not prevent resuming

    @staticmethod
    def of(folder: Path | None) -> EarlierPart:
        """Reads a run's folder; None if it does not exist.

        Costs: reading its checkpoint and its events.

        Raises:
            UsageError: it holds no run, or no complete checkpoint, or something in it is damaged; the message names the file.
        """
        if folder is None:
            return EarlierPart(RunData())
        run = RunData.load(folder, decided=False)
        newest = checkpoint_files.newest(folder / "checkpoint")
        about, saved = _about(newest), checkpoint.load_parameters(newest)
        if about["run_id"] != run.config.get("run_id"):
            raise UsageError(
                f"The checkpoint {newest} and {folder / 'config.json'} belong to two runs: put back the one that was "
                "replaced, or start the run again."
            )
        configured = _algorithm(run.config, folder / "config.json")  # a resumed run may have died before it saved
        algorithm = _algorithm(about, newest / "complete.json") or configured
        alike = algorithm is not None and algorithm.lockstep and run.config.get("layout") is None
        checkpoint.check_programs(newest, alike=alike)
        models = {worker: checkpoint.load_model(newest, worker) for worker in about["workers"]}
        own = {worker: model[:2] for worker, model in models.items() if model is not None}
        records, later, notes = {}, {}, []
        for worker, rows in _all_events(folder, run, about["started_s"]).items():
            version, _ = own.get(worker, (saved.version, 0))
            is_in = versions_of(rows, waits=about["waits"]) <= version
            later[worker], rows = rows[~is_in], rows[is_in]
            records[worker] = _once(rows)
            if len(records[worker]) < len(rows):
                twice = len(rows) - len(records[worker])
                notes.append(f"{twice:,} events of worker {worker} in {folder} are there twice, and count once.")
        gone = _check_events(folder, newest, records, about["events"])
        versions_of_own = bool(own) or (algorithm is not None and algorithm.in_rounds)
        if versions_of_own or (algorithm is not None and algorithm.needs.kind in _ONE_EVENT_EACH):
            _check_made_once(folder, records, versions_of_own=versions_of_own, since=about["since"])
        if own:
            known = {worker: int(np.count_nonzero(rows["applied_version"] > 0)) for worker, rows in records.items()}
            updates_lost = sum(max(0, number - known.get(worker, 0)) for worker, (_, number) in own.items())
        else:
            updates_lost = unrecorded(records, saved.version, waits=about["waits"])
        lost = max(updates_lost, about["records_lost"] + gone)
        if lost:
            notes.append(
                f"{lost:,} events up to the checkpoint are not in {folder}: they count as `records_lost`, and their samples do"
                " not count. Workers were killed before they wrote them, or a file was changed."
            )
        result = {"samples": about["samples"], "wall_s": about["elapsed_s"], "initial_loss": about["initial_loss"]}
        result |= {"records_lost": lost, "updates_lost": updates_lost}
        missed = {batch for batch in _batches(later) if 0 <= batch < saved.next_batch} - _batches(records)
        result["batches_missed"] = about["batches_missed"] + len(missed)
        evaluations = [one for one in run.evaluations if one["elapsed_s"] <= about["elapsed_s"]]
        run = RunData(run.config, result, records, evaluations)
        return EarlierPart(run, folder, newest, saved, algorithm, about["since"], tuple(notes))

    def change_to(self, algorithm: Algorithm | None, workers: int) -> EarlierPart:
        """The part for a run that resumes with this algorithm (None: its own); a changed algorithm adds a note.

        Raises:
            UsageError: a checkpoint of the earlier algorithm cannot be used with this one, or the run needs its plan.
        """
        before = self.algorithm
        if before is not None and before.same_batches and not (algorithm and algorithm.same_batches):
            raise UsageError(
                "The run was started with a plan and without an algorithm: resume it with launch(plan=...), or start another"
                " run."
            )
        if before is None or algorithm is None or before == algorithm:
            return self  # workers of a placed model check their own parts
        old, new = spec(before), spec(algorithm)
        if algorithm.same_batches:
            raise UsageError(f"The run was started with {old}: give launch the same algorithm, or start another run.")
        rules = [_innermost(one.server_rule) for one in (before, algorithm)]
        if None not in rules and type(rules[0]) is not type(rules[1]):
            why = (
                f"applied gradients by {apply_registry.spec(rules[0])} at its servers, whose state is in the checkpoint"
            )
        elif before.gossip and not algorithm.gossip:
            why = "gave every worker its own model"
        elif algorithm.in_rounds and not before.in_rounds and workers > 1:
            why = "let workers take different numbers of batches"
        else:
            assert self.saved is not None
            note = f"The run continues with {new}; until version {self.saved.version:,} it was {old}."
            return replace(self, since=self.saved.version, notes=(*self.notes, note))
        raise UsageError(
            f"The run was started with {old}, which {why}: it cannot be resumed with {new}. Leave the algorithm out "
            f"to continue with {old}, or start another run."
        )

    @property
    def batches_done(self) -> frozenset[int]:
        """Batches, from the next one on, whose updates the checkpoint already contains: they were in progress then."""
        if self.saved is None:
            return frozenset()
        return frozenset(batch for batch in _batches(self.run.records) if batch >= self.saved.next_batch)

    @property
    def done_before(self) -> tuple[int, int]:
        """Steps and samples of all workers."""
        samples = [rows["samples"] for rows in self.run.records.values()]
        return sum(int((one > 0).sum()) for one in samples), sum(int(one.sum()) for one in samples)

    @property
    def run_id(self) -> str:
        """The id that the run's configuration and checkpoints share; "" without an earlier part."""
        return self.run.config.get("run_id", "")

    def is_in(self, folder: Path | None) -> bool:
        """Whether the run continues in its own folder."""
        return folder is not None and self.folder is not None and folder.resolve() == self.folder.resolve()

    def keep(self, folder: Path) -> None:
        """Writes the events in their final form, before the spool files are reused."""
        save_events(folder, self.run.records)
        with files.writing(folder):
            for path in folder.glob("events-*.bin"):
                path.unlink()


def forget(folder: Path, earlier: EarlierPart) -> None:
    """Removes the files of a run that never began; the run that it should have resumed is unchanged."""
    if earlier.is_in(folder) and earlier.checkpoint is not None:
        with contextlib.suppress(NotWrittenError):
            write_config(folder, earlier.run.config)
            checkpoint_files.clear((folder / "checkpoint").resolve(), keep=earlier.checkpoint.resolve())
        new = list(folder.glob("events-*.bin"))
    else:
        new = [*folder.glob("events-*"), folder / "config.json"]
    for path in new:
        with contextlib.suppress(OSError):
            path.unlink()
    if not earlier.is_in(folder):
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)  # what workers wrote as the run ended


def _innermost(rule: ApplyRule | None) -> ApplyRule | None:
    while isinstance(rule, Delayed):
        rule = rule.rule
    return rule


def _algorithm(config: dict[str, Any], path: Path) -> Algorithm | None:
    named = config.get("algorithm")
    if not isinstance(named, str | None):
        raise UsageError(f"{path} names an unknown algorithm: {named!r} is none")
    try:
        return algorithm_named(named) if named is not None else None
    except UsageError as error:
        raise UsageError(f"{path} names an unknown algorithm: {error}") from error


def _about(newest: Path) -> dict[str, Any]:
    about = checkpoint_files.describe(newest)
    checks: checkpoint.Checks = {
        **dict.fromkeys(("number", "workers", "sha256"), lambda one: True),  # `describe` has checked them
        **dict.fromkeys(("samples", "batches_missed", "records_lost", "since"), checkpoint.is_count),
        **dict.fromkeys(("run_id", "algorithm"), lambda one: isinstance(one, str)),
        "elapsed_s": lambda one: _is_finite(one) and one >= 0,
        "started_s": _is_finite,
        "waits": lambda one: isinstance(one, bool),
        "events": lambda one: isinstance(one, dict) and all(w.isdecimal() and _are_groups(g) for w, g in one.items()),
        "initial_loss": lambda one: one is None or isinstance(one, int | float),
    }
    if not checkpoint.has_entries(about, checks):
        raise UsageError(
            f"{newest / 'complete.json'} lacks an entry that resuming needs, or has an impossible value: start the "
            "run again without it."
        )
    return about


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, dict) and all(
        bits.isdecimal()
        and isinstance(count, list)
        and len(count) == 2
        and all(checkpoint.is_count(n, 2**64) for n in count)
        for bits, count in groups.items()
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _all_events(folder: Path, run: RunData, started_s: float) -> dict[int, np.ndarray]:
    """By worker: the events in their final form, and those that a killed run left in spool files."""
    found = dict(run.records)
    for path in sorted(folder.glob("events-*.bin")):
        match = _SPOOL.fullmatch(path.name)
        if match is None:
            continue
        try:
            unfinished = read_spool(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
        check_records(unfinished, path)
        shift_times(unfinished, -started_s)
        worker = int(match[1])
        found[worker] = np.concatenate([found[worker], unfinished]) if worker in found else unfinished
    return dict(sorted(found.items()))


def _batches(records: Mapping[int, np.ndarray]) -> set[int]:
    return {batch for rows in records.values() for batch in rows["batch"].tolist()}


def _once(rows: np.ndarray) -> np.ndarray:
    _, first = np.unique(np.ascontiguousarray(rows).view(np.dtype((np.void, RECORD_DTYPE.itemsize))), return_index=True)
    return rows[np.sort(first)]


def _check_events(folder: Path, newest: Path, records: Mapping[int, np.ndarray], counts: Mapping[str, Groups]) -> int:
    """How many of the events that a checkpoint counts are missing; refuses a folder in which they differ."""
    gone = 0
    for worker, groups in counts.items():
        missing = num_missing(records.get(int(worker), np.empty(0, RECORD_DTYPE)), groups)
        if missing is None:
            raise UsageError(
                f"{folder} has other events of worker {worker} than its run wrote before the checkpoint {newest}: restore "
                "the original file, or start the run again."
            )
        gone += missing
    return gone


def _check_made_once(folder: Path, records: Mapping[int, np.ndarray], *, versions_of_own: bool, since: int) -> None:
    """Refuses a folder in which one update has two different events; with `versions_of_own`, two of one worker.

    Up to version `since` the run had another algorithm, whose updates may have several events.
    """
    applied = [rows["applied_version"][rows["applied_version"] > since] for rows in records.values()]
    for versions in applied if versions_of_own else [np.concatenate([*applied, np.empty(0, np.int64)])]:
        ordered = np.sort(versions)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise UsageError(
                f"{folder} has the events of two runs, because its update {twice[0]} was made twice: start the run "
                "again in another folder."
            )
