"""Lower bounds on a step's time for every placement: how far a plan can be from the optimum."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.model_parallel.graph.problem import Problem

__all__ = ["Bounds", "bounds", "check_memory"]


@dataclass(frozen=True)
class Bounds:
    """Seconds that a step needs in every placement.

    Args:
        path_s: the longest path through one micro-batch's forward and backward pass, without transfers, on the fastest device.
        work_s: all work divided by the sum of all devices' speeds.
    """

    path_s: float
    work_s: float

    @property
    def least_s(self) -> float:
        """The higher of the two."""
        return max(self.path_s, self.work_s)


def bounds(problem: Problem) -> Bounds:
    """Both bounds of a problem; they ignore pinned groups, so they may be lower than necessary."""
    fastest = min(one.slowness for one in problem.devices)
    path = [0.0] * len(problem.groups)
    for group in range(len(problem.groups)):
        before = max((path[problem.tensors[t].producer] for t in problem.reads[group]), default=0.0)
        path[group] = before + problem.groups[group].step_s
    work_s = sum(one.step_s for one in problem.groups) * problem.microbatches
    speed = sum(1.0 / one.slowness for one in problem.devices)
    return Bounds(max(path, default=0.0) * fastest, work_s / speed)


def check_memory(problem: Problem) -> None:
    """Rejects a problem that no placement fits in memory.

    Raises:
        UsageError: the message names the groups, the memory that they need, and the memory available.
    """
    limits = [one.memory_bytes for one in problem.devices]
    needs = {first: problem.memory_of_class(first) for first in problem.members}
    for first, need in needs.items():
        room = [limits[device] for device in problem.choices[first]]
        largest = max((one for one in room if one is not None), default=None)
        if None not in room and largest is not None and need > largest:
            raise UsageError(
                f"{problem.groups[first].name} and what must be with it need {need / 1e6:,.1f} MB, and the largest device that"
                f" they may be on has {largest / 1e6:,.1f} MB: give it more memory, or cut the model there."
            )
    total = sum(needs.values())
    if None not in limits and total > (there := sum(one or 0 for one in limits)):
        raise UsageError(
            f"The model needs {total / 1e6:,.1f} MB, and the {len(limits)} devices have {there / 1e6:,.1f} MB together: add a"
            " device or memory, or make the batch smaller."
        )
