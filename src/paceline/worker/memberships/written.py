"""The files of a worker without a supervisor, for its launcher: its id, how it ended, its records, the run's model."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.errors import NotWrittenError, UsageError
from paceline.records.run_data import read_events, write_events, write_json
from paceline.system import tensor_files


def write_state(folder: Path, worker_id: int, incarnation: int, state: str, **figures: Any) -> None:
    """Writes `worker-<id>-<incarnation>.json`: the worker's state, such as "started" or "ended", and its figures."""
    about = {"worker": worker_id, "incarnation": incarnation, "pid": os.getpid(), "state": state, **figures}
    with _or_warning():
        write_json(folder / f"worker-{worker_id}-{incarnation}.json", about)


def write_end(
    folder: Path, worker_id: int, records: np.ndarray, model: nn.Module | None, *, incarnation: int = 0
) -> None:
    """Writes the worker's records, after those of earlier incarnations, and the model if it is the run's."""
    events = folder / f"events-{worker_id}.jsonl"
    with _or_warning():
        earlier = read_events(events) if incarnation and events.exists() else records[:0]
        write_events(events, np.concatenate([earlier, records]))
        if model is not None:
            tensor_files.save(folder / "model.pt", _on_cpu(model.state_dict()))


@contextlib.contextmanager
def _or_warning() -> Iterator[None]:
    """Turns a failed write into a warning, so that the user's program continues: it may have a model to save."""
    try:
        yield
    except (NotWrittenError, UsageError) as error:
        warnings.warn(str(error), stacklevel=5)


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.cpu()
    return state  # with what PyTorch keeps beside its items
