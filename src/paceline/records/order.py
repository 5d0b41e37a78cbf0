"""Decisions of timing that the records of steps lack: 16 bytes for each answer of a server, or for each average.

Under methods with servers a row is one shard's answer: `moment` counts the worker's requests, `peer` is the shard, `at` the
version of the parameters after it, and `of` the version of the update that the worker's gradient became.

Under `d-psgd` a row says that in round `moment` the model of `peer` did not come (`of` is NONE), or that `peer` came as a
replacement.

If workers average in pairs, a row is one worker's half of an average: it made version `moment` of the worker's model, from
the model of `peer` at version `at`, and its own at version `of`; NONE: it copied that of `peer`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import UsageError
from paceline.records.step_record import RowFormat
from paceline.system import files
from paceline.system.plain_files import read_npz

Process = tuple[int, int]  # a worker and its incarnation
ORDER_FILE = "order.npz"
NONE = 2**32 - 1  # in place of a version
ORDER_DTYPE = np.dtype(
    [
        ("moment", "<u4"),
        ("at", "<u4"),
        ("of", "<u4"),
        ("peer", "<u2"),
        ("incarnation", "u1"),
        ("peer_incarnation", "u1"),
    ]
)
ORDER = RowFormat(ORDER_DTYPE, struct.Struct("<IIIHBB"), "order.unwritten")
assert ORDER.struct.size == ORDER_DTYPE.itemsize == 16


@dataclass(frozen=True)
class OrderWriter:
    """Writes one worker's rows; implements `Ports.decided`. Numbers wrap: a run that exceeds them cannot be replayed."""

    append: Callable[..., None]
    incarnation: int

    def __call__(self, moment: int, *, peer: int, at: int, of: int, peer_incarnation: int = 0) -> None:
        self.append(
            moment & NONE, at & NONE, of & NONE, peer & 0xFFFF, self.incarnation & 0xFF, peer_incarnation & 0xFF
        )


def save_order(path: Path, order: Mapping[int, np.ndarray]) -> None:
    """Writes all workers' rows; without any, removes the file.

    Raises:
        NotWrittenError: the file cannot be written.
    """
    with files.writing(path):
        path.unlink(missing_ok=True)
    if order:
        with files.replacing(path) as file:
            arrays: dict[str, Any] = {str(worker): rows for worker, rows in order.items()}
            np.savez(file, **arrays)


def read_order(path: Path) -> dict[int, np.ndarray]:
    """By worker, what `save_order` wrote; empty if there is no file.

    Raises:
        UsageError: the file is damaged.
    """
    remedy = "remove it, as only replays need it"
    arrays = read_npz(path, remedy) if path.exists() else {}
    if not all(name.isdecimal() and rows.dtype == ORDER_DTYPE and rows.ndim == 1 for name, rows in arrays.items()):
        raise UsageError(f"{path} does not hold the recorded order of events; {remedy}.")
    return {int(name): rows for name, rows in arrays.items()}


def order_of(order: Mapping[int, np.ndarray], process: Process) -> np.ndarray:
    """The rows of one process, of those of all workers."""
    worker, incarnation = process
    rows = order.get(worker, np.empty(0, ORDER_DTYPE))
    return rows[rows["incarnation"] == incarnation]


class Exchange(NamedTuple):
    """One request of a worker, as one shard answered it."""

    at: int | None  # the version of the parameters after it; None: unknown, and nothing depends on it
    of: int  # the update that its gradient became; 0: it had none, or it was dropped


def exchanges_of(rows: np.ndarray) -> list[Exchange]:
    """A process's exchanges with a single shard, from the records of its steps."""
    if not len(rows):
        return []
    reads: list[int | None] = [*rows["read_version"].tolist()]
    applied, late = rows["applied_version"].tolist(), rows["gradient_version"].tolist()
    after = [at if of < 0 else read for of, at, read in zip(applied, late, [*reads[1:], None], strict=True)]
    return [Exchange(reads[0], 0), *(Exchange(at, max(of, 0)) for at, of in zip(after, applied, strict=True))]
