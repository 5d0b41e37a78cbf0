"""`backups=auto`: choose the number of backup workers from the measured round trips of the running training."""

from __future__ import annotations

from collections import deque

import numpy as np

from paceline.planner.backup_times import PUBLISHED_HALF_EFFICIENT, arrived_step_s, most_backups, time_to_target

_NUM_DRAWS = 400


class BackupController:
    """`backups=auto`: chooses b every few steps from the reported round trips.

    Report dropped gradients too: late ones count. A worker that is late for one step also misses the next ones without a
    report; therefore a step's times are drawn from each worker's own round trips instead of taken as they arrived. So a worker
    that is always slow stays visible.
    """

    def __init__(
        self,
        num_workers: int,  # M, including backups
        *,
        every_steps: int = 50,
        window: int = 200,  # round trips remembered per worker
        max_backups: int | None = None,  # maximum b; None: M / 4, or 1
    ) -> None:
        if num_workers < 1 or every_steps < 1 or window < 1:
            raise ValueError("num_workers, every_steps and window must be 1 or more")
        self.backups = 0  # the current b
        self._num_workers, self._every, self._window = num_workers, every_steps, window
        self._max = max_backups
        self._round_trips: dict[int, deque[float]] = {}

    def arrived(self, worker_id: int, round_trip_s: float) -> None:
        """A gradient arrived, in time or late, `round_trip_s` after the worker was sent the parameters for it."""
        self._round_trips.setdefault(worker_id, deque(maxlen=self._window)).append(round_trip_s)

    def left(self, worker_id: int) -> None:
        self._round_trips.pop(worker_id, None)
        self._num_workers = max(1, self._num_workers - 1)
        self.backups = min(self.backups, self._most())

    def joined(self) -> None:
        self._num_workers += 1

    def step_done(self, step: int) -> int:
        """Call after every step, counted from 0; returns b for the next."""
        if (step + 1) % self._every == 0 and len(self._round_trips) == self._num_workers:
            self.backups = int(np.argmin(self.times_to_target()))
        return self.backups

    def times_to_target(self) -> np.ndarray:
        """(B,) relative times to the target with b = 0, 1, ... backups, over the workers that have sent gradients."""
        draws = np.random.default_rng(0)
        times = [np.array(self._round_trips[worker]) for worker in sorted(self._round_trips)]
        arrivals_s = np.stack([draws.choice(one, _NUM_DRAWS) for one in times], axis=1) if times else np.empty((0, 0))
        step_s = arrived_step_s(arrivals_s, self._most())
        return time_to_target(step_s, [len(times) - b for b in range(len(step_s))], PUBLISHED_HALF_EFFICIENT)

    def _most(self) -> int:
        return most_backups(self._num_workers, self._max)
