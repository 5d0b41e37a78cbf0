"""The numbers of events that a checkpoint contains, and their fingerprints: a resumed run compares its files with them.

Events are counted by worker, and by the number of bits of their step: if a file has lost some, the others can still be
distinguished from another run's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from paceline.records.step_record import RECORD_DTYPE

Groups = dict[str, tuple[int, int]]
"""By the bits of a step, as text: how many events there are, and the sum of their hashes."""
_NUM_WORDS = RECORD_DTYPE.itemsize // 8
_FACTORS = np.arange(1, 2 * _NUM_WORDS, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # odd, so no bit gets lost


class EventCounts:
    """Counts events as they come; a checkpoint contains the events up to its version.

    Costs 24 bytes for each event.

    Args:
        records: by worker, the events of the run before it was resumed.
        waits: whether gradients may be delayed to later updates.
    """

    def __init__(self, records: Mapping[int, np.ndarray], *, waits: bool) -> None:
        self.waits = waits
        self._events: dict[int, list[np.ndarray]] = {}  # by worker: arrays (3, n) of versions, bits and hashes
        for worker, rows in records.items():
            self.take(worker, rows)

    def take(self, worker: int, rows: np.ndarray) -> None:
        """Adds a worker's next events, whose times count from the run's start."""
        one = np.stack([versions_of(rows, waits=self.waits), _bits(rows), _hashes(rows).view(np.int64)])
        self._events.setdefault(worker, []).append(one)

    def up_to(self, version: Callable[[int], int]) -> dict[str, Groups]:
        """By worker, as text: its events up to `version(worker)`."""
        found = {}
        for worker, chunks in self._events.items():
            chunks[:] = [np.concatenate(chunks, axis=1)]
            versions, bits, hashes = chunks[0]
            is_in = versions <= version(worker)
            of_each = {one: hashes[is_in & (bits == one)] for one in np.unique(bits[is_in]).tolist()}
            found[str(worker)] = {str(one): (len(own), _sum(own)) for one, own in of_each.items()}
        return found


def num_missing(rows: np.ndarray, groups: Groups) -> int | None:
    """How many of the counted events are missing from a worker's; None if different ones have taken their place.

    `rows` are in order of arrival: those beyond the counted ones came later.
    """
    bits, missing = _bits(rows), 0
    for one, (number, known) in groups.items():
        own = rows[bits == int(one)]
        missing += max(0, number - len(own))
        if len(own) >= number and _sum(_hashes(own[:number])) != known:
            return None
    return missing


def versions_of(rows: np.ndarray, *, waits: bool) -> np.ndarray:
    """The version from which a checkpoint contains each event: its update's, or its gradient's if it made no update.

    A checkpoint contains waiting gradients from their arrival.
    """
    made = np.where(rows["applied_version"] > 0, rows["applied_version"], rows["gradient_version"])
    return np.minimum(made, rows["gradient_version"] + 1) if waits else made


def _bits(rows: np.ndarray) -> np.ndarray:
    return np.frexp(rows["step"].astype(np.float64))[1].astype(np.int64)


def _hashes(rows: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each event, which changes with any number in it."""
    rows = np.ascontiguousarray(rows, RECORD_DTYPE).copy()
    rows["loss"][np.isnan(rows["loss"])] = np.nan  # files keep only one of NaN's many bit patterns
    mixed = (rows.view(np.uint64).reshape(len(rows), _NUM_WORDS) * _FACTORS).sum(axis=1, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * _FACTORS[-1]  # else sums of events with swapped numbers are equal
    return mixed ^ (mixed >> np.uint64(29))


def _sum(hashes: np.ndarray) -> int:
    return int(hashes.view(np.uint64).sum(dtype=np.uint64))
