"""Small tables, one row per worker, that the workers of a run share besides their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from paceline.membership.board import Board, MemoryBoard, StoreBoard

NUM_GENERATORS = 4  # Python's, NumPy's, PyTorch's for the CPU, PyTorch's for the model's GPU
WATCHED_STEPS = 3  # in which the workers' inputs are compared
_RANDOM_STATES, _FIRST_INPUTS, _PROGRESS = "random states", "first inputs", "progress"


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
