"""Collectives without overlap, as on cores that also compute: started operations run at the first `wait`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from paceline.ports.ports import Handle


class Operation(NamedTuple):
    """An operation that has been started and not been carried out."""

    kind: Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "reduce"]
    vector: torch.Tensor  # (n,); for all-to-all, what is given
    part: (
        torch.Tensor
    )  # (n / num_workers,), or the vector itself where there are no parts; for all-to-all, what is taken (n,)
    root: int = 0  # of broadcast and reduce


class CarriedOutTogether:
    """The part of `Collectives` that queues operations; waiting for one carries out all of them."""

    members: Sequence[int]

    def __init__(self) -> None:
        self._started: list[Operation] = []
        self._handles: list[_Started] = []
        self._num_started = self._num_done = 0

    def start_all_reduce(self, vector: torch.Tensor) -> Handle:
        """Begins replacing `vector` (n,) by the sum over all workers, in the order of their ids."""
        return self._start(Operation("all-reduce", vector, vector))

    def start_reduce_scatter(self, vector: torch.Tensor, part: torch.Tensor) -> Handle:
        """Begins summing `vector` (n,); `part` (n / num_workers,) becomes this worker's piece of the sum."""
        return self._start(Operation("reduce-scatter", vector, part))

    def start_all_gather(self, part: torch.Tensor, vector: torch.Tensor) -> Handle:
        """Begins collecting every worker's `part` (n / num_workers,) in `vector` (n,)."""
        return self._start(Operation("all-gather", vector, part))

    def start_all_to_all(self, given: torch.Tensor, taken: torch.Tensor) -> Handle:
        """Begins sending piece k of `given` (n,) to worker k; `taken` (n,) receives the pieces for this worker."""
        return self._start(Operation("all-to-all", given, taken))

    def _start(self, operation: Operation) -> Handle:
        self._num_started += 1
        self._started.append(operation)
        self._handles.append(_Started(self, self._num_started))
        return self._handles[-1]

    def finish(self, number: int) -> None:
        """Carries out all that was started, if operation `number` is still among it; workers wait at the same places."""
        if number > self._num_done:
            operations, self._started = self._started, []
            handles, self._handles = self._handles, []
            self._num_done = self._num_started
            self._carry_out(operations)
            for one in handles:
                one.members = self.members

    def start_broadcast(self, vector: torch.Tensor, root: int) -> Handle:
        """Begins replacing `vector` (n,) by that of `root`."""
        return self._start(Operation("broadcast", vector, vector, root))

    def start_reduce(self, vector: torch.Tensor, root: int) -> Handle:
        """Begins replacing the root's `vector` (n,) by the sum over all workers, in the order of their ids."""
        return self._start(Operation("reduce", vector, vector, root))

    def _carry_out(self, operations: list[Operation]) -> None:
        """As is right for one worker."""
        for operation in operations:
            if operation.kind in ("reduce-scatter", "all-to-all"):
                operation.part.copy_(operation.vector)
            elif operation.kind == "all-gather":
                operation.vector.copy_(operation.part)


class _Started:
    """An operation that has been started; implements `Handle`."""

    def __init__(self, owner: CarriedOutTogether, number: int) -> None:
        self._owner = owner
        self._number = number
        self.members: Sequence[int] = ()

    def wait(self) -> Sequence[int]:
        self._owner.finish(self._number)
        return self.members
