"""The whole run's progress as one worker sees it, for learning-rate schedules."""

from __future__ import annotations

from typing import Any

import numpy as np


class RunProgress:
    """Steps and samples of all workers so far, each step of a worker counted as one.

    | workers | count |
    |---|---|
    | alone | its own |
    | in lockstep, with `worker.batches` | the batches of the rounds so far, the same on all workers |
    | in lockstep, one model, own batches | the number of workers times rounds; samples as the mean weights them |
    | in lockstep, a model per worker, own batches | the number of workers times its own |
    | not in lockstep, on one machine or simulated | what every worker has counted in shared memory |
    | not in lockstep, otherwise | by the number of its last batch; with own batches, the number of workers times its own |

    Dropped gradients count as well: a loop with one worker would have applied them.
    """

    def __init__(
        self,
        *,
        worker_id: int,
        num_workers: int,
        lockstep: bool,  # whether they go through rounds together
        # (workers, 2) in memory that all share: steps and samples; None: they share none.
        table: np.ndarray[Any, np.dtype[np.int64]] | None,
        before: tuple[int, int] = (0, 0),  # steps and samples of the run's earlier part
    ) -> None:
        self._num_workers = num_workers
        self._sums = table if not lockstep else None
        # Steps and samples of this worker; a list, as reading NumPy's numbers costs ten times as much.
        self._own = [0, 0]
        self._row = self._sums[worker_id] if self._sums is not None else None
        #: Steps and samples of all workers in lockstep; a newcomer sets them to the others'.
        self.position = list(map(float, before))
        self._rounds = self._batches = self._batch_samples = 0  # handed out since the last step
        self._per_batch = 0.0  # samples, of this worker's last step
        self._reached = 0  # batches of the run, as the number of this worker's last one tells
        self._own_batches = 0

    @property
    def steps(self) -> float:
        return self._of_all(0)

    @property
    def samples(self) -> int:
        return round(self._of_all(1))

    def _of_all(self, kind: int) -> float:
        counted = self.position[kind]
        if self._sums is not None:
            return counted + int(self._sums[:, kind].sum())
        if self._reached:
            return counted + self._reached * self._own[kind] / self._own_batches
        return counted

    def go_on_with(self, num_workers: int) -> None:
        """Rounds have this many workers from now on, because others have died or come."""
        self._num_workers = num_workers

    def begin_at(self, batches: int, samples: int) -> None:
        """Sets the batches and samples before the checkpoint of a resumed run."""
        if not self.position[0]:
            self.position = [float(batches), float(samples)]

    def hand_out_round(self, batches: int, samples: int) -> None:
        """All workers together get `batches` batches with `samples` samples; 0: unknown."""
        self._rounds += 1
        self._batches += batches
        self._batch_samples += samples

    def hand_out(self, number: int) -> None:
        self._own_batches += 1
        if self._sums is None and self._num_workers > 1:
            self._reached = max(self._reached, number + 1)

    def add(self, own: int, together: int) -> None:
        """A step is over.

        Args:
            own: samples that this worker had in it; 0: it had a batch again.
            together: samples of all workers, where a mean has told them; 0: it has not.
        """
        if self._rounds:
            self._per_batch = own / self._rounds or self._per_batch
            self.position[0] += self._batches / self._rounds
            self.position[1] += together or self._batch_samples or self._batches * self._per_batch
            self._rounds = self._batches = self._batch_samples = 0
        elif own:
            self._own[0] += 1
            self._own[1] += own
            if self._row is not None:
                self._row += (1, own)
            if self._sums is None and not self._reached:
                self.position[0] += self._num_workers
                self.position[1] += together or self._num_workers * own
