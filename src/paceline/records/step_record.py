"""The record that a worker writes once per step: of fixed size, so it survives a kill and costs under a microsecond."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

# One row per computed gradient, and per round that has no batch for this worker. Times are seconds on the run's shared
# monotonic clock.
_INTEGERS = (
    "step",  # this worker's step number, from 1, counted within its incarnation
    "batch",  # global number of the batch in the run: epoch * batches_per_epoch + index; -1 unknown
    "incarnation",  # 0 for a worker's first process, 1 after one restart, ...
    "samples",  # 0: there was no batch
    "read_version",  # version the gradient was computed at
    "gradient_version",  # newest version when the gradient was ready (first publish attempt for slot methods)
    "applied_version",  # version that this update made (>= 1), or will make, if it waits; -1: the gradient was dropped;
    # 0: there was none, and a worker with a model of its own made no step
    "failed_publishes",
    "messages",  # sent to other workers since the last record; so are the three below
    "sent_bytes",
    "averages",  # of this worker's parameters with others'
    "peer_failures",
    "coded_elements",  # of vectors that a codec made smaller, since the last record
    "coded_bytes",  # what they were sent as, scales and framing included
    "partner",  # worker, or server after the workers, with which the longest wait or exchange of models was
)
_FLOATS = (
    "started_s",  # the step began (input wait is before gradient_started_s and inside the step)
    "input_s",  # of it: waiting for and preparing input
    "gradient_started_s",
    "gradient_ended_s",
    "wait_s",  # of the step: waiting for locks, barriers, back-off
    "apply_s",  # of the step: copying and updating parameters
    "codec_s",  # coding and decoding, since the last record
    "partner_s",  # how long that was; 0: with none
    "ended_s",
    "loss",  # mean loss of the batch at the parameters read; NaN if the loop did not report it
)
RECORD_DTYPE = np.dtype([(name, "<i8") for name in _INTEGERS] + [(name, "<f8") for name in _FLOATS])


class RowFormat(NamedTuple):
    """Rows of fixed size: as an array, and as one writer packs them."""

    dtype: np.dtype
    struct: struct.Struct
    unwritten: str  # the fail point at which a row is about to be written


STEPS = RowFormat(RECORD_DTYPE, struct.Struct(f"<{len(_INTEGERS)}q{len(_FLOATS)}d"), "ring.unwritten")
#: Fields that only runs with a codec, or with messages, have: files of events leave them out if all are 0.
CODED = ("coded_elements", "coded_bytes", "codec_s")
PARTNER = ("partner", "partner_s")
assert STEPS.struct.size == RECORD_DTYPE.itemsize == 200


def without_waiting(records: Mapping[int, np.ndarray], version: int) -> dict[int, np.ndarray]:
    """Records in which the gradients that still wait at the end of a run, at `version`, count as dropped."""
    found = {}
    for worker, rows in records.items():
        waiting = rows["applied_version"] > version
        if waiting.any():
            rows = rows.copy()
            rows["applied_version"][waiting] = -1
        found[worker] = rows
    return found


_TIMES = ("started_s", "gradient_started_s", "gradient_ended_s", "ended_s")


def shift_times(records: np.ndarray, by_s: float) -> None:
    """Moves a worker's records in time, in place."""
    for column in _TIMES:
        records[column] += by_s


def begin_at_zero(records: Mapping[int, np.ndarray]) -> None:
    """Moves all workers' records in time, in place, so that the first step begins at 0."""
    begun_s = min((float(rows["started_s"].min()) for rows in records.values() if len(rows)), default=0.0)
    for rows in records.values():
        shift_times(rows, -begun_s)


def last_s(records: Mapping[int, np.ndarray]) -> float:
    """When the last step ended: the run's duration."""
    return max((float(rows["ended_s"].max()) for rows in records.values() if len(rows)), default=0.0)


class Recorder(Protocol):
    """Where the record of a step goes."""

    def append(self, *fields: float) -> None:
        """Writes one record."""


class PackedRecords:
    """Rows in memory, packed: millions of tuples would keep the garbage collector busy."""

    def __init__(self, rows: RowFormat = STEPS) -> None:
        self._rows, self._data = rows, bytearray()

    def append(self, *fields: float) -> None:
        self._data += self._rows.struct.pack(*fields)

    def array(self) -> np.ndarray:
        return np.frombuffer(bytes(self._data), self._rows.dtype)
