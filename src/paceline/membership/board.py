"""A few integers per worker that all workers can read, in shared memory or in a store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import WorkerLostError


class MemoryBoard:
    """A row of nonzero numbers for each worker, in shared memory."""

    def __init__(self, table: torch.Tensor, worker_id: int) -> None:
        self._table = table
        self._worker_id = worker_id

    @property
    def is_written(self) -> bool:
        """Whether this worker, or its dead predecessor, has written its row."""
        return bool(self._table[self._worker_id].any())

    def put(self, numbers: Sequence[int]) -> None:
        """Writes this worker's row in order: the last number marks it as complete."""
        for place, number in enumerate(numbers):
            self._table[self._worker_id, place] = number

    def rows(self) -> list[list[int]] | None:
        """All rows by worker; None as long as one is incomplete."""
        rows: list[list[int]] = self._table.tolist()
        return rows if all(row[-1] for row in rows) else None


class StoreBoard:
    """A board in a torch store or at a join point."""

    def __init__(self, store: Any, name: str, worker_id: int, num_workers: int) -> None:
        self._store = store
        self._own = f"{name}/{worker_id}"
        self._keys = [f"{name}/{worker}" for worker in range(num_workers)]

    def put(self, numbers: Sequence[int]) -> None:
        """Writes this worker's row; does nothing if the join point is gone."""
        with contextlib.suppress(WorkerLostError):
            self._store.set(self._own, json.dumps(list(numbers)))

    def rows(self) -> list[list[int]] | None:
        """All rows; None as long as one is missing, or if the join point is gone or a row is malformed."""
        try:
            if not self._store.check(self._keys):
                return None
            rows = [json.loads(self._store.get(key)) for key in self._keys]
        except (WorkerLostError, ValueError, RecursionError):
            return None
        return rows if all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows) else None


Board = MemoryBoard | StoreBoard
