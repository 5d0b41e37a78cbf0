"""One run as data: its configuration, result, step records and evaluations; written to a folder and read back.

A run's folder holds `config.json`, `result.json`, `evaluations.json` and one `events-<worker>.jsonl` per worker; more than
256 workers share a few `events-<first>-<last>.jsonl`, whose lines name the worker. Every file is written under another name
first and then renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.records.order import ORDER_FILE, read_order, save_order
from paceline.records.step_record import CODED, PARTNER, RECORD_DTYPE, without_waiting
from paceline.system import files

_LINES_PER_CHUNK = 50_000
_NAMES: tuple[str, ...] = RECORD_DTYPE.names or ()
_SHARED_DTYPE = np.dtype([("worker", np.int64), *RECORD_DTYPE.descr])
_MOST = 2**53  # beyond it, JSON's readers may lose digits
_MOST_WORKERS = 10_000_000
_MOST_S = 1e10  # three centuries
_MOST_FILES = 256  # thousands of files take longer to make than to fill
_EVENTS_FILE = re.compile(r"events-(\d{1,18})(?:-(\d{1,18}))?\.jsonl", re.ASCII)

# What readers of a result compute with.
_KINDS = {"version": int, "restarts": int, "computed_gradients": int, "workers_lost": list, "view_changes": list}


@dataclass(slots=True)
class RunData:
    """Everything that was recorded of one run.

    Args:
        config: the run's options: task, algorithm, workers, seed, learning rate and so on.
        result: `summarize`'s figures plus outcome, versions, machine and command.
        records: worker_id -> that worker's steps (`RECORD_DTYPE`), times in seconds from the run's start.
        order: worker_id -> decisions that depended on timing and are not in the steps (`ORDER_DTYPE`), if replays need them.
        evaluations: dicts with `elapsed_s`, `version`, `samples`, `train_loss`, `test_loss`, `test_accuracy`; a value
            that was not measured is None.
        returned: worker_id -> its function's return value; from `simulate` only, and not saved.
    """

    config: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    records: dict[int, np.ndarray] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    returned: dict[int, Any] = field(default_factory=dict)
    order: dict[int, np.ndarray] = field(default_factory=dict)

    def save(self, folder: str | Path) -> Path:
        """Write the run's files into `folder`, made if missing; events of workers that it no longer has are removed.

        Costs about 6 us per record, most of it to write its numbers so that they round-trip, and 0.3 ms per file.

        Raises:
            NotWrittenError: a file cannot be written; later files are not written, so that a result implies the rest.
        """
        folder = Path(folder)
        with files.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "result.json").unlink(missing_ok=True)  # until everything is rewritten
        write_config(folder, self.config)
        save_events(folder, self.records)
        save_order(folder / ORDER_FILE, self.order)
        write_json(folder / "evaluations.json", self.evaluations)
        write_json(folder / "result.json", self.result)  # last: a folder with a result is complete
        return folder

    @classmethod
    def load(cls, folder: str | Path, *, decided: bool = True) -> RunData:
        """Read what `save` wrote. A run that was killed before its result was written loads with an empty result.

        Args:
            folder: the run's.
            decided: whether gradients that still waited when the run ended count as dropped. False: the run is about to be
                resumed, so they keep the versions of their future updates, and `config.json` must have its checksum.

        Raises:
            UsageError: the folder does not exist, holds no run, or a file in it is damaged.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} is not the folder of a run: it has no config.json.")
        records = _read_all_events(folder)
        result = files.read_json(folder / "result.json", {})
        for name, kind in _KINDS.items() if decided else ():
            if type(value := result.get(name, kind())) is not kind:
                raise UsageError(f"{folder / 'result.json'} is damaged: its {name} is {value!r}.")
        if decided and "version" in result and not result.get("gossip"):
            records = without_waiting(records, result["version"])
        evaluations = files.read_json(folder / "evaluations.json", [])
        if not all(isinstance(one, dict) and _is_evaluation(one) for one in evaluations):
            raise UsageError(f"{folder / 'evaluations.json'} is damaged: it does not hold evaluations.")
        config = files.read_json(folder / "config.json", {})
        if files.CHECKSUM in config or not decided:
            config = files.read_checked_json(folder / "config.json")
        return cls(config, result, records, evaluations, order=read_order(folder / ORDER_FILE))


def _is_evaluation(one: dict[str, Any]) -> bool:
    """Whether it has a time and all figures, each a number or None."""
    numbers = [one.get(name, "") for name in ("version", "samples", "train_loss", "test_loss", "test_accuracy")]
    return is_number(one.get("elapsed_s")) and all(value is None or is_number(value) for value in numbers)


def is_number(value: Any) -> bool:
    """Whether it is a number and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def write_events(path: str | Path, records: np.ndarray) -> None:
    """Write records as JSON Lines, one object per record with the dtype's names as keys; values round-trip exactly.

    NaN becomes null; JSON has no infinity, so it becomes 1e999, a valid number that every parser reads as infinity.
    """
    _check_dtype(records)
    chunks = (records[at : at + _LINES_PER_CHUNK] for at in range(0, len(records), _LINES_PER_CHUNK))
    files.write_chunks(Path(path), chain.from_iterable(map(_lines, chunks)))


def save_events(folder: Path, records: Mapping[int, np.ndarray]) -> None:
    """Write the events of all workers into a run's folder, and remove other files of events that it has."""
    written: set[str] = set()
    shared = len(records) > _MOST_FILES
    for group in _groups(records, without_gaps=shared):
        workers = [worker_id for worker_id, _ in group]
        rows = np.concatenate([own for _, own in group], dtype=RECORD_DTYPE)
        if shared:
            named = np.empty(len(rows), _SHARED_DTYPE)
            named["worker"] = np.repeat(workers, [len(own) for _, own in group])
            for column in _NAMES:
                named[column] = rows[column]
            name = f"events-{workers[0]}-{workers[-1]}.jsonl"
            files.write_chunks(folder / name, _lines(named))
            written.add(name)
            continue
        lines = _lines(rows)
        for worker_id, own in group:
            name = f"events-{worker_id}.jsonl"
            files.write_chunks(folder / name, islice(lines, len(own)))
            written.add(name)
    with files.writing(folder):
        for path in folder.glob("events-*.jsonl"):
            if path.name not in written and _EVENTS_FILE.fullmatch(path.name):
                path.unlink()


def _read_all_events(folder: Path) -> dict[int, np.ndarray]:
    """The events of each worker, in the workers' order, from the files of `save_events`."""
    records: dict[int, np.ndarray] = {}
    for path in folder.iterdir():
        match = _EVENTS_FILE.fullmatch(path.name)
        if match is None:
            continue
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _MOST_WORKERS:
            raise UsageError(f"{path} does not have the name of a file of events: remove it.")
        workers = range(first, last + 1)
        if twice := [worker for worker in workers if worker in records]:
            raise UsageError(
                f"{path}: another file also has events of worker {twice[0]}, as after an interrupted save: remove the "
                "older one."
            )
        if match[2] is None:
            records[first] = read_events(path)
            check_records(records[first], path)
            continue
        rows = _read_events(path, _SHARED_DTYPE)
        check_records(rows, path)
        ends = np.searchsorted(rows["worker"], workers, side="right").tolist()
        in_order = not (np.diff(rows["worker"]) < 0).any() and ends[-1] == len(rows)
        if not in_order or (len(rows) and (rows["worker"][0] < first or not _is_whole(path))):
            raise UsageError(f"{path}: its lines must be those of workers {first} to {last}, in this order.")
        own = rows[list(_NAMES)].astype(RECORD_DTYPE)
        records |= {worker: own[begin:end] for worker, begin, end in zip(workers, [0, *ends], ends, strict=False)}
    return dict(sorted(records.items()))


def _is_whole(path: Path) -> bool:
    """Whether a file ends with a line end; a shared file is never written piecewise."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _check_dtype(records: np.ndarray) -> None:
    if records.dtype != RECORD_DTYPE:
        raise UsageError(f"Expected records of RECORD_DTYPE, got an array of {records.dtype}.")


def _groups(records: Mapping[int, np.ndarray], *, without_gaps: bool) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Workers in their order, as many at a time as make up a chunk of lines; one with more is alone.

    Without gaps, a group ends where a worker's number is left out: its first and last say which workers it has.
    """
    group: list[tuple[int, np.ndarray]] = []
    num_lines = 0
    for worker_id, own in sorted(records.items()):
        _check_dtype(own)
        is_full = num_lines + len(own) > _LINES_PER_CHUNK
        if group and (is_full or (without_gaps and worker_id != group[-1][0] + 1)):
            yield group
            group, num_lines = [], 0
        group.append((worker_id, own))
        num_lines += len(own)
    if group:
        yield group


def _lines(records: np.ndarray) -> Iterator[str]:
    """One line per record. Formatting numbers so that they round-trip takes most time, so equal ones are formatted once."""
    columns, parts = [], []
    groups = (group for group in (CODED, PARTNER) if not any(records[name].any() for name in group))
    left_out = set(chain.from_iterable(groups))
    for name in records.dtype.names or ():
        if name in left_out:
            continue
        values = np.ascontiguousarray(records[name])
        bits = values.view(np.int64)  # NaNs are equal, zeros differ
        distinct, of_each = np.unique(bits, return_inverse=True)
        if len(distinct) == 1:
            parts.append(f'"{name}": {_texts(values[:1])[0]}')
            continue
        parts.append(f'"{name}": %s')
        if 2 * len(distinct) > len(values):
            columns.append(_texts(values))
        else:
            columns.append(np.array(_texts(distinct.view(values.dtype)), object)[of_each].tolist())
    line = "{" + ", ".join(parts) + "}\n"
    return map(line.__mod__, zip(*columns, strict=True)) if columns else repeat(line, len(records))


def _texts(values: np.ndarray) -> list[str]:
    texts = list(map(repr, values.tolist()))
    if values.dtype.kind == "f":
        for row in np.flatnonzero(~np.isfinite(values)).tolist():
            texts[row] = {"nan": "null", "inf": "1e999", "-inf": "-1e999"}[texts[row]]
    return texts


def read_events(path: str | Path) -> np.ndarray:
    """Read a file of `write_events`; ignores keys that a record does not have; missing `CODED` and `PARTNER` ones are 0.

    A killed writer may leave a last line without a line end: it counts if it is complete and is skipped if not.

    Raises:
        UsageError: another line is not an event; the message names file and line.
    """
    return _read_events(Path(path), RECORD_DTYPE)


def _read_events(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}.") from None
    unfinished = lines.pop()
    with suppress(ValueError, RecursionError):
        if unfinished and isinstance(json.loads(unfinished), dict):
            lines.append(unfinished)
    records = np.empty(len(lines), dtype)
    for at in range(0, len(lines), _LINES_PER_CHUNK):
        chunk = lines[at : at + _LINES_PER_CHUNK]
        try:
            rows = [_row(event, dtype) for event in json.loads("[" + ",".join(chunk) + "]")]
            if len(rows) != len(chunk):
                raise ValueError("a line does not hold exactly one event")
            records[at : at + len(chunk)] = rows
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise _damaged(path, chunk, at, dtype) from None
    return records


def check_records(records: np.ndarray, path: Path) -> None:
    """Refuses records that no run can make, as from a damaged file that is still well-formed; names the first."""
    is_sound = np.ones(len(records), bool)
    for name in _NAMES:
        values = records[name]
        if values.dtype.kind == "i":
            is_sound &= (values >= -1) & (values < _MOST)
        elif name != "loss":
            is_sound &= np.isfinite(values) & (np.abs(values) < _MOST_S)
    if not is_sound.all():
        raise UsageError(
            f"{path}, event {int(np.argmin(is_sound)) + 1}: it holds a value that no run writes: the file is damaged."
        )


def _row(event: dict[str, Any], dtype: np.dtype[Any]) -> tuple[float, ...]:
    event = {**dict.fromkeys(CODED + PARTNER, 0), **event}
    return tuple(math.nan if (value := event[name]) is None else value for name in dtype.names or ())


def _damaged(path: Path, lines: list[str], lines_before: int, dtype: np.dtype[Any]) -> UsageError:
    for number, line in enumerate(lines, start=lines_before + 1):
        try:
            np.array(_row(json.loads(line), dtype), dtype)
        except KeyError as missing:
            return UsageError(f"{path}, line {number}: the event has no {missing}.")
        except (ValueError, TypeError, OverflowError, RecursionError):
            return UsageError(f"{path}, line {number} is not an event: {line[:80]!r}.")
    return UsageError(f"{path}: lines {lines_before + 1} to {lines_before + len(lines)} are not events.")


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a run's `config.json`, with its checksum."""
    content = _plain(dict(config))
    write_json(folder / "config.json", {**content, files.CHECKSUM: files.checksum_of(content)})


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinities become null, NumPy values become Python's."""
    files.write_text(Path(path), json.dumps(_plain(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in value]
        case np.ndarray() | np.generic():
            return _plain(value.tolist())
        case float():
            return value if math.isfinite(value) else None
        case None | bool() | int() | str():
            return value
    return str(value)
