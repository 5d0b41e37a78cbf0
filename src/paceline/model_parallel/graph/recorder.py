"""Records times of a placed run's workers in a few of its steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from paceline.model_parallel.graph.plan_data import PlanData
from paceline.model_parallel.graph.problem import TensorInfo
from paceline.system.files import write_text

FORMAT = 1
_STEPS = range(2, 12)  # by then memory has been allocated


@dataclass
class _Step:
    """One worker's step: the groups that ran, where each group's backward pass began, and its messages.

    Messages are (side, kind, operation, number, from, to, begin, end), their side "out" or "in".
    """

    forward: list[tuple[str, int, float, float]] = field(default_factory=list)
    marks: list[tuple[float, str, int]] = field(default_factory=list)
    messages: list[tuple[str, str, str, int, int, int, float, float]] = field(default_factory=list)
    end_s: float = 0.0

    def events(self) -> list[tuple[str, str, int, float, float]]:
        """(kind, group, micro-batch, begin, end); messages split a backward pass into pieces."""
        found = [("forward", *one) for one in self.forward]
        waits = sorted((one[6], one[7]) for one in self.messages)
        first: dict[tuple[str, int], float] = {}
        for at_s, name, microbatch in sorted(self.marks):
            first.setdefault((name, microbatch), at_s)
        begins = [*first.items(), (("", 0), self.end_s)]
        for ((name, microbatch), begin_s), (_, end_s) in pairwise(begins):
            for wait_s, done_s in waits:
                if begin_s < wait_s < end_s:
                    found.append(("backward", name, microbatch, begin_s, wait_s))
                    begin_s = done_s
            found.append(("backward", name, microbatch, begin_s, max(begin_s, end_s)))
        return found


class Recorder:
    """Records one worker's times, in ten steps after the first two.

    Costs: two clock reads for each group and message in these steps; a comparison in others.
    """

    def __init__(self, worker: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._worker, self.clock = worker, clock
        self._number = -1
        self.microbatch = 0  # that runs
        self._step: _Step | None = None
        self._steps: dict[int, _Step] = {}

    def begin_step(self, *, trains: bool) -> None:
        """A forward pass begins; one that trains has a backward pass."""
        self._number += trains
        is_wanted = trains and self._number in _STEPS
        self._step = self._steps.setdefault(self._number, _Step()) if is_wanted else None

    def ran(self, group: str, begun_s: float, values: Iterable[Any]) -> None:
        """A group's forward pass has ended; its backward pass begins when the first of its values gets a gradient."""
        step, microbatch = self._step, self.microbatch
        if step is None:
            return
        step.forward.append((group, microbatch, begun_s, self.clock()))
        for one in values:
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(lambda _: step.marks.append((self.clock(), group, microbatch)))

    def message(
        self, side: str, kind: str, number: int, tensor: TensorInfo, ends: tuple[int, int], begun_s: float
    ) -> None:
        """A send or a receive has returned."""
        if self._step is not None:
            self._step.messages.append((side, kind, tensor.node, number, *ends, begun_s, self.clock()))

    def end_backward(self) -> None:
        if self._step is not None:
            self._step.end_s = self.clock()
        self._step = None

    def write(self, folder: Path, plan: PlanData) -> None:
        """Writes the finished steps; worker 0 also writes the plan."""
        whole = {number: one for number, one in self._steps.items() if one.end_s}
        values: dict[str, Any] = {
            "paceline_placed": FORMAT,
            "steps": {number: {"groups": one.events(), "messages": one.messages} for number, one in whole.items()},
        }
        write_text(
            path_of(folder, self._worker), json.dumps(values | ({"plan": plan.as_json()} if not self._worker else {}))
        )


def path_of(folder: Path, worker: int) -> Path:
    """The file of one worker's times."""
    return folder / f"placed-{worker}.json"
