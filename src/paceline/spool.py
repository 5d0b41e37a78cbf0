"""Gathers the workers' records while a run is going on; on disk where the run has a folder, so that a kill loses little."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np

from paceline.arena import Arena
from paceline.memory.records import RECORD_DTYPE
from paceline.memory.ring import RecordRing

__all__ = ["Spool", "read_spool"]


class Spool:
    """Empties the rings of all workers.

    Args:
        folder: where `events-<worker>.bin` grow; None: kept in memory.
        num_workers: number of workers.
    """

    def __init__(self, folder: Path | None, num_workers: int) -> None:
        self.totals = [0] * num_workers
        self.fresh: list[np.ndarray] = [np.empty(0, RECORD_DTYPE)] * num_workers  # what the last drain brought
        self._rings: list[RecordRing] = []
        self._chunks: list[list[np.ndarray]] = [[] for _ in range(num_workers)]
        self._folder = folder
        self._files: list[IO[bytes]] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._files = [_file(folder, worker).open("wb", buffering=0) for worker in range(num_workers)]

    def open(self, arena: Arena) -> None:
        """Connects the workers' rings."""
        self._rings = [arena.ring(worker) for worker in range(arena.plan.num_workers)]

    @property
    def lost(self) -> int:
        """Records that were overwritten before they were read."""
        return sum(ring.lost for ring in self._rings)

    def num_written(self, worker_id: int) -> int:
        """Records that a worker has written, drained or not."""
        return self._rings[worker_id].num_written

    def num_read(self, worker_id: int) -> int:
        """Records of a worker that were drained, or were lost before that."""
        return self._rings[worker_id].num_read

    def drain(self) -> None:
        """Takes what is new from every ring."""
        for worker, ring in enumerate(self._rings):
            records = ring.drain()
            self.totals[worker] += len(records)
            self.fresh[worker] = records
            if not len(records):
                continue
            if self._files:
                self._files[worker].write(records.tobytes())
            else:
                self._chunks[worker].append(records)

    def records(self) -> dict[int, np.ndarray]:
        """All records so far, by worker; times on the machine's monotonic clock."""
        if self._folder is not None:
            return {worker: read_spool(_file(self._folder, worker)) for worker in range(len(self._files))}
        return {
            worker: np.concatenate(chunks) if chunks else np.empty(0, RECORD_DTYPE)
            for worker, chunks in enumerate(self._chunks)
        }

    def close(self) -> None:
        """Closes the files; `records` can still be read."""
        for file in self._files:
            file.close()

    def remove(self) -> None:
        """Deletes the files, once the events are written in their final form."""
        if self._folder is not None:
            for worker in range(len(self._files)):
                _file(self._folder, worker).unlink(missing_ok=True)


def read_spool(path: Path) -> np.ndarray:
    """Reads a spool file; a record that was cut off by a kill is left out."""
    content = path.read_bytes()
    whole = len(content) // RECORD_DTYPE.itemsize * RECORD_DTYPE.itemsize
    return np.frombuffer(content[:whole], dtype=RECORD_DTYPE).copy()


def _file(folder: Path, worker: int) -> Path:
    return folder / f"events-{worker}.bin"
