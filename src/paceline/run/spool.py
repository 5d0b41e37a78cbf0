"""Collects the workers' records during a run; on disk if the run has a folder, so that a kill loses little."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from paceline.memory.arena import Arena
from paceline.memory.ring import RecordRing
from paceline.records.step_record import RECORD_DTYPE
from paceline.system import files


class Spool:
    """Empties the rings of all workers.

    Records that a full or failing disk does not take stay in memory until the next drain tries again.

    Raises:
        NotWrittenError: the files cannot be made.
    """

    def __init__(self, folder: Path | None, num_workers: int, tell: Callable[[str], object]) -> None:
        self.totals = [0] * num_workers
        self.fresh = [np.empty(0, RECORD_DTYPE)] * num_workers  # the records of the last drain, by worker
        self.failure = ""  # why the disk takes no more records; "" if it does
        self._tell: Callable[[str], object] | None = tell  # takes a sentence, once, if the disk takes no more
        self._rings: list[RecordRing] = []
        self._order_rings: list[RecordRing] = []
        # In memory, as a killed run is not replayed.
        self._order: list[list[np.ndarray]] = [[] for _ in range(num_workers)]
        self.folder = folder  # where `events-<worker>.bin` grow; None: kept in memory
        self._files: list[IO[bytes]] = []
        self._unwritten = [bytearray() for _ in range(num_workers)]
        if folder is not None:
            with files.writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                self._files = [files.new_file(_file(folder, worker)) for worker in range(num_workers)]

    def open(self, arena: Arena) -> None:
        workers = range(arena.plan.num_workers)
        self._rings = [arena.ring(worker) for worker in workers]
        self._order_rings = [ring for worker in workers if (ring := arena.order(worker)) is not None]

    @property
    def lost(self) -> int:
        """Records that were overwritten before they were read."""
        return sum(ring.lost for ring in (*self._rings, *self._order_rings))

    def num_written(self, worker_id: int) -> int:
        """Records that a worker has written, drained or not."""
        return self._rings[worker_id].num_written

    def num_read(self, worker_id: int) -> int:
        """Records of a worker that were drained or lost."""
        return self._rings[worker_id].num_read

    def drain(self) -> None:
        for worker, ring in enumerate(self._rings):
            records = ring.drain()
            self.totals[worker] += len(records)
            self.fresh[worker] = records
            self._unwritten[worker] += records.tobytes()
            if self.folder is not None:
                self._write(worker, self.folder)
        for rows, ring in zip(self._order, self._order_rings, strict=False):
            if len(fresh := ring.drain()):
                rows.append(fresh)
        if not any(self._unwritten):
            self.failure = ""

    def _write(self, worker: int, folder: Path) -> None:
        unwritten, file = self._unwritten[worker], self._files[worker]
        try:
            while unwritten:  # a disk that is all but full takes a part
                del unwritten[: os.write(file.fileno(), unwritten)]
        except OSError as error:
            self.failure = str(files.not_written(_file(folder, worker), error))
            if self._tell is not None:
                self._tell(f"Events are kept in memory until there is room for them: {self.failure}")
                self._tell = None

    def records(self) -> dict[int, np.ndarray]:
        """All records so far, by worker; times on the machine's monotonic clock."""
        return {
            worker: _whole((_file(self.folder, worker).read_bytes() if self.folder is not None else b"") + unwritten)
            for worker, unwritten in enumerate(self._unwritten)
        }

    def order(self) -> dict[int, np.ndarray]:
        """What timing has decided so far, by worker; empty if nothing is recorded of that."""
        return {worker: np.concatenate(rows) for worker, rows in enumerate(self._order) if rows}

    def close(self) -> None:
        """Closes the files; `records` can still be read."""
        for file in self._files:
            file.close()

    def remove(self) -> None:
        """Deletes the files, once the events are written in their final form."""
        if self.folder is not None:
            for worker in range(len(self._files)):
                _file(self.folder, worker).unlink(missing_ok=True)


def read_spool(path: Path) -> np.ndarray:
    """Reads a spool file; a record that was cut off by a kill is left out."""
    return _whole(path.read_bytes())


def _whole(content: bytes) -> np.ndarray:
    whole = len(content) // RECORD_DTYPE.itemsize * RECORD_DTYPE.itemsize
    return np.frombuffer(content[:whole], dtype=RECORD_DTYPE).copy()


def _file(folder: Path, worker: int) -> Path:
    return folder / f"events-{worker}.bin"
