"""A ring of fixed-size records from one worker to the supervisor, which outlives the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from paceline.memory.atomics import fence, kernel, load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.segment import Layout, Segment
from paceline.records.step_record import STEPS, RowFormat


@dataclass(frozen=True, kw_only=True)
class RingPlan:
    """Where a ring lies in its segment (offsets in bytes)."""

    capacity: int
    written: int
    records: int


@kernel("void(int64, int64)")
def _announce(written: int, count: int) -> None:
    store(written, count)
    # The next record may overwrite one that the reader is just copying. It must not become visible before this count does, or
    # the reader would not notice.
    fence()


@kernel("int64(int64)")
def _count_after_copying(written: int) -> int:
    fence()
    return load(written)


class RecordRing:
    """Records (`records/step_record.py`, or rows of another format) from one writer to one reader; the writer never waits.

    A record counts once the writer has announced it by its number, so a record that a kill cut short is never read. A
    reader that falls `capacity` records behind loses the oldest and knows how many.
    Costs: `append` under 1 us, with no allocation and no system call.
    """

    def __init__(self, segment: Segment, plan: RingPlan, rows: RowFormat = STEPS) -> None:
        self._records = segment.array(plan.records, plan.capacity, rows.dtype)
        self._row_bytes, self._pack_into, self._unwritten = rows.struct.size, rows.struct.pack_into, rows.unwritten
        self._buffer = memoryview(cast(bytearray, segment.mapping))[
            plan.records : plan.records + plan.capacity * self._row_bytes
        ]
        self._capacity = plan.capacity
        self._written = segment.address + plan.written
        self._num_appended = load(self._written)  # a restarted worker continues after its predecessor's records
        self.num_read = 0
        self.lost = 0  # number of records that were overwritten before `drain` read them

    @staticmethod
    def reserve(layout: Layout, *, capacity: int = 4096, name: str = "ring", rows: RowFormat = STEPS) -> RingPlan:
        """Reserves a ring of `capacity` records (of steps, 200 bytes each; at 1000 steps per second, 4096 last four seconds).

        Raises:
            ValueError: the capacity is below 2: one record is always the one being written.
        """
        if capacity < 2:
            raise ValueError(f"a ring needs room for at least 2 records, not {capacity}")
        return RingPlan(
            capacity=capacity,
            written=layout.words(f"{name}.written", 1),
            records=layout.reserve(f"{name}.records", capacity * rows.struct.size),
        )

    def append(self, *fields: float) -> None:
        """Writes one record, its fields in the order of `RECORD_DTYPE` (the writer's side).

        Raises:
            struct.error: the number or a type of the fields is wrong; nothing is announced.
        """
        fail_point(self._unwritten)
        number = self._num_appended
        self._pack_into(self._buffer, number % self._capacity * self._row_bytes, *fields)
        self._num_appended = number + 1
        _announce(self._written, number + 1)

    @property
    def num_written(self) -> int:
        """Records written so far, over all lives of the writer."""
        return load(self._written)

    @property
    def newest_version(self) -> int:
        """The version that the last record's step made, or, if it made none, computed at; 0: there is no record."""
        if not (written := load(self._written)):
            return 0
        last = self._records[(written - 1) % self._capacity]
        return max(0, int(last["applied_version"]), int(last["gradient_version"]))

    def drain(self) -> npt.NDArray[np.void]:
        """The records since the last call, oldest first, as a private array (the reader's side)."""
        written = load(self._written)
        start = max(self.num_read, written - self._capacity)
        # take() with wrapping copies the ring's one or two pieces in one go.
        copied = self._records.take(np.arange(start, written), mode="wrap")
        # While we copied, the writer may have gone on, and it is writing record `now` at this moment: what lies a whole
        # ring before that, or earlier, may be a mixture of two records.
        now = _count_after_copying(self._written)
        sound = min(max(start, now - self._capacity + 1), written)
        self.lost += sound - self.num_read
        self.num_read = written
        return copied[sound - start :]
