"""What the workers of a run tell each other beside their gradients: small tables, one row for each worker."""

from __future__ import annotations

from typing import Any

import torch

from paceline.loop.random_numbers import NUM_GENERATORS, alike
from paceline.loop.run_progress import RunProgress
from paceline.loop.same_inputs import WATCHED_STEPS
from paceline.membership.board import Board, MemoryBoard, StoreBoard
from paceline.membership.environment import WorkerEnvironment

__all__ = ["board_of_inputs", "equal_states", "progress_of", "tables", "tell_random_states"]

_RANDOM_STATES, _FIRST_INPUTS, _PROGRESS = "random states", "first inputs", "progress"


def tables(num_workers: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types of the tables, by name."""
    return {
        _RANDOM_STATES: ((num_workers, NUM_GENERATORS + 1), torch.int64),  # and whether the worker has written them
        _FIRST_INPUTS: ((num_workers, WATCHED_STEPS), torch.int64),
        _PROGRESS: ((num_workers, 2), torch.int64),
    }


def tell_random_states(environment: WorkerEnvironment, arena: Any) -> None:
    """Writes the states of a worker's generators down, unless its predecessor has: these are what the others began with."""
    board = MemoryBoard(arena.extra(_RANDOM_STATES), environment.worker_id)
    if not board.is_written:
        board.put([*(environment.random_states or [0] * NUM_GENERATORS), 1])


def equal_states(session: Any) -> tuple[bool, ...]:
    """Of each global generator, whether all workers had the same state as they attached."""
    environment = session.environment
    if environment is None or not environment.random_states:
        return ()
    if session.membership is not None:
        rows = session.membership.random_states()
    else:
        rows = MemoryBoard(session.arena.extra(_RANDOM_STATES), environment.worker_id).rows()
    return alike(rows, environment.random_states)


def progress_of(session: Any, *, num_workers: int, lockstep: bool) -> RunProgress:
    """What counts the run's steps and samples."""
    environment = session.environment
    if environment is None:
        return RunProgress(worker_id=0, num_workers=1, lockstep=lockstep, table=None)
    return RunProgress(
        worker_id=environment.worker_id,
        num_workers=num_workers,
        lockstep=lockstep,
        table=session.arena.extra(_PROGRESS).numpy() if session.membership is None else None,
        before=environment.options.get("done_before", (0, 0)),
    )


def board_of_inputs(session: Any) -> Board:
    """Where workers compare what they call their models with first."""
    environment = session.environment
    if session.membership is None:
        return MemoryBoard(session.arena.extra(_FIRST_INPUTS), environment.worker_id)
    return StoreBoard(session.membership.store, "inputs", environment.worker_id, environment.num_workers)
