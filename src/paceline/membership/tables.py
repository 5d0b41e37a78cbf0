"""Small tables, one row per worker, that the workers of a run share besides their gradients."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from paceline.errors import WorkerLostError

NUM_GENERATORS = 4  # Python's, NumPy's, PyTorch's for the CPU, PyTorch's for the model's GPU
WATCHED_STEPS = 3  # in which the workers' inputs are compared
_RANDOM_STATES, _FIRST_INPUTS, _PROGRESS = "random states", "first inputs", "progress"


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


class SharedTables:
    """Tables in memory that the workers share.

    Attributes:
        inputs: where workers compare the first inputs to their models.
        progress: (workers, 2): steps and samples of each.
        states: of the generators with which the workers started.
    """

    def __init__(self, find: Callable[[str], torch.Tensor], worker_id: int) -> None:
        self.inputs: Board = MemoryBoard(find(_FIRST_INPUTS), worker_id)
        self.progress: np.ndarray[Any, np.dtype[np.int64]] | None = find(_PROGRESS).numpy()
        self.states = MemoryBoard(find(_RANDOM_STATES), worker_id)

    def tell_random_states(self, states: Sequence[int]) -> None:
        """Writes this worker's states, unless its predecessor did: the others started along with the predecessor."""
        if not self.states.is_written:
            self.states.put([*(states or [0] * NUM_GENERATORS), 1])


class StoredTables:
    """Tables in a torch store or at a join point, without shared progress counts."""

    def __init__(self, store: Any, worker_id: int, num_workers: int) -> None:
        self.inputs: Board = StoreBoard(store, "inputs", worker_id, num_workers)
        self.progress: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self.states = StoreBoard(store, "random", worker_id, num_workers)

    def tell_random_states(self, states: Sequence[int]) -> None:
        """Writes this worker's states, if there are any to compare."""
        if states:
            self.states.put(states)


Tables = SharedTables | StoredTables


def table_shapes(num_workers: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the shared tables, by name."""
    return {
        _RANDOM_STATES: ((num_workers, NUM_GENERATORS + 1), torch.int64),  # and whether the worker has written them
        _FIRST_INPUTS: ((num_workers, WATCHED_STEPS), torch.int64),
        _PROGRESS: ((num_workers, 2), torch.int64),
    }


def local_tables(num_workers: int) -> dict[str, torch.Tensor]:
    """Tables for workers in one process."""
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in table_shapes(num_workers).items()}
