"""The collectives of the workers along one axis of a mesh, as its layers use them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import WorkerLostError, first_line, name_workers
from paceline.optim.half_types import add_up
from paceline.transport.collectives import SLICE, has_failed
from paceline.transport.roll_call import RollCall

__all__ = ["Alone", "Axis", "GroupAxis", "Started"]

# The name since PyTorch 2.13, where the old one warns.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Started(Protocol):
    """An operation in progress."""

    def wait(self) -> object:
        """Returns when it is done."""
        ...


class Axis(Protocol):
    """The workers that differ only in one coordinate of the mesh.

    Attributes:
        size: number of workers.
        index: this worker's position among them.
    """

    size: int
    index: int

    def all_gather(self, x: Tensor) -> Tensor:
        """All workers' `x`, (size, *x.shape)."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This worker's entry of `x` (size, ...), summed over all."""
        ...

    def start_all_reduce(self, x: Tensor) -> Started:
        """Begins replacing `x` by the sum."""
        ...

    def start_all_reduce_max(self, x: Tensor) -> Started:
        """Begins replacing `x` by the largest."""
        ...

    def start_broadcast(self, x: Tensor, source: int) -> Started:
        """Begins replacing `x` by that of worker `source`."""
        ...

    def start_reduce(self, x: Tensor, to: int) -> Started:
        """Begins replacing `x` by the sum on worker `to`; on others it is then undefined."""
        ...


class Alone:
    """An axis of one worker, which sends nothing."""

    size = 1
    index = 0

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0]

    def start_all_reduce(self, x: Tensor) -> Started:
        return _Done()

    def start_all_reduce_max(self, x: Tensor) -> Started:
        return _Done()

    def start_broadcast(self, x: Tensor, source: int) -> Started:
        return _Done()

    def start_reduce(self, x: Tensor, to: int) -> Started:
        return _Done()


class _Done:
    def wait(self) -> None:
        """It is done."""


class GroupAxis:
    """An axis whose workers are a process group of torch.distributed: Gloo on CPUs, NCCL on GPUs.

    Gloo's own reduce-scatter is an all-reduce for each worker, so on a CPU the pieces go directly to their owners, which sum
    them in worker order.

    Args:
        group: in the order of the axis.
        name: in messages.
        roll_call: of all workers of the mesh: a worker that waits for workers who have given up stops as well, and all name
            the missing worker, even if it is in none of their groups.
    """

    def __init__(self, group: Any, name: str, roll_call: RollCall) -> None:
        self.size: int = dist.get_world_size(group)
        self.index: int = dist.get_rank(group)
        self._group = group
        self._name = name
        self._roll_call = roll_call

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        flat = x.contiguous().view(-1)
        self._start(
            "all-gather", x, lambda: _all_gather(gathered.view(-1), flat, group=self._group, async_op=True)
        ).wait()
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        pieces = torch.empty_like(x)
        self._start(
            "reduce-scatter",
            x,
            lambda: dist.all_to_all_single(pieces.view(-1), x.view(-1), group=self._group, async_op=True),
        ).wait()
        total = torch.empty_like(x[0])
        add_up(pieces.unbind(), total)
        return total

    def start_all_reduce(self, x: Tensor) -> Started:
        return self._start("all-reduce", x, lambda: dist.all_reduce(x, group=self._group, async_op=True))

    def start_all_reduce_max(self, x: Tensor) -> Started:
        return self._start(
            "all-reduce", x, lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=self._group, async_op=True)
        )

    def start_broadcast(self, x: Tensor, source: int) -> Started:
        rank = dist.get_global_rank(self._group, source)
        return self._start("broadcast", x, lambda: dist.broadcast(x, rank, group=self._group, async_op=True))

    def start_reduce(self, x: Tensor, to: int) -> Started:
        rank = dist.get_global_rank(self._group, to)
        return self._start("reduce", x, lambda: dist.reduce(x, rank, group=self._group, async_op=True))

    def _start(self, what: str, x: Tensor, issue: Any) -> Started:
        try:
            return _GroupOperation(self, issue(), what, in_slices=x.device.type == "cpu")
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def wait_for(self, work: Any, what: str, *, in_slices: bool) -> None:
        """Waits for one operation; over Gloo it also watches the other workers, while NCCL's wait is a stream's."""
        while True:
            try:
                work.wait(SLICE) if in_slices else work.wait()
                self._roll_call.operation_ended()
                return
            except RuntimeError as error:  # Gloo also raises it for a timeout
                if not in_slices or has_failed(work):
                    raise self._lost(what, error) from error
                if not work.is_completed() and self._roll_call.somebody_gave_up():
                    raise self._lost(what, "another worker has given up") from error

    def _lost(self, what: str, why: Exception | str) -> WorkerLostError:
        answers = self._roll_call.give_up()
        why = first_line(why) if isinstance(why, Exception) else why
        remedy = "start all workers again from the last checkpoint"
        rank, workers = dist.get_rank(), range(dist.get_world_size())
        here = f"{what} of its {self._name}"
        if answers is None:
            return WorkerLostError(
                f"Worker {rank} lost the workers' common store in {here}, most likely with the worker or launcher that holds"
                f" it ({why}): {remedy}."
            )
        if missing := [worker for worker in workers if worker not in answers[0]]:
            return WorkerLostError(f"Worker {rank} lost {name_workers(missing)} in {here} ({why}): {remedy}.")
        return WorkerLostError(f"Worker {rank} failed in {here} ({why}), though all workers are there: {remedy}.")


class _GroupOperation:
    def __init__(self, axis: GroupAxis, work: Any, what: str, *, in_slices: bool) -> None:
        self._axis, self._work, self._what, self._in_slices = axis, work, what, in_slices

    def wait(self) -> None:
        self._axis.wait_for(self._work, self._what, in_slices=self._in_slices)
