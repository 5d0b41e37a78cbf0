"""`delay=auto`: how late averages arrive, chosen from the measured times of a step and an average."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import torch

from paceline.algorithms.means import MeanUnderWay
from paceline.ports.ports import Ports
from paceline.ports.shared import ReplicatedParameters

_MEASURED_STEPS = 4
_SHORTEST_S = 1e-9


class ChosenDelay:
    """The smallest delay that hides an average, measured once; the same on all workers."""

    def __init__(self, ports: Ports[ReplicatedParameters], most: int) -> None:
        self._ports = ports
        self._most = most
        self.steps_s: list[float] = []  # how long each step has taken
        self._last_s = ports.clock.now_s()

    def count_step(self) -> None:
        before, self._last_s = self._last_s, self._ports.clock.now_s()
        self.steps_s.append(self._last_s - before)

    def is_ready(self) -> bool:
        """Whether a step's time is known: the first steps take longer, as libraries initialize."""
        return len(self.steps_s) >= _MEASURED_STEPS

    def take(self, start: Callable[[], MeanUnderWay]) -> int:
        """Returns the delay after two discarded averages, started by `start`: the first may open connections."""
        ports, collectives = self._ports, self._ports.collectives
        assert collectives is not None
        step_s = median(self.steps_s)
        average_s = 0.0
        for _ in range(2):
            collectives.start_all_reduce(torch.zeros(1, dtype=torch.float64)).wait()  # a barrier: times no straggler
            average_s = -ports.clock.now_s()
            start().wait()
            average_s += ports.clock.now_s()
        told = torch.zeros(2, ports.num_workers, dtype=torch.float64)
        told[:, ports.worker_id] = torch.tensor([step_s, average_s])
        collectives.start_all_reduce(told.view(-1)).wait()
        steps_s, averages_s = told[:, list(collectives.members)].tolist()
        return min(self._most, math.ceil(max(averages_s) / max(min(steps_s), _SHORTEST_S)))
