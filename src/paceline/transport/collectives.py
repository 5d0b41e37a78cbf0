"""Collectives over torch.distributed: Gloo for parameters on the CPU, NCCL for those on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import WorkerLostError, name_workers
from paceline.optim.half_types import add_up, to_sum_type
from paceline.ports.ports import NO_NUMBERS, Counts, Handle
from paceline.ports.rooted import count_operation
from paceline.transport.roll_call import RollCall

_SLICE = timedelta(seconds=0.5)  # how often a waiting worker checks whether another one has given up
_BETWEEN_QUERIES_S = 20e-6  # between polls of a GPU operation: a poll costs a microsecond

# The names since PyTorch 2.13, where the old ones warn.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DistributedCollectives:
    """Implements `Collectives`. Operations run in the group's own threads, in the order in which they were started.

    Sums use the vectors' own dtype; only `all_reduce_mean` adds up half types in float32, which takes twice the bytes. Every
    worker gets the same bits, because each component is added up along the ring once and then passed on; the order of
    addition is the ring's, not that of the ids. A reduce-scatter on the CPU adds up in the order of the ids: Gloo's own is an
    all-reduce, which sends twice as much, so the pieces go straight to their owners, which add them up.

    A killed worker closes its connections, so its neighbours' Gloo operations fail at once. NCCL's do not fail: there a killed
    worker is given up after `timeout_s`, like one that hangs. A worker that fails says so in the store; the others check the
    store while they wait, report that they are present, and stop as well. A worker that reports nothing is missing.

    Attributes:
        waited_s: seconds spent in `wait`; the caller reads it and sets it back to 0.
        on_wait: called before and during each wait, every half second; an error that it raises ends the wait.
    """

    remedy = (
        "Start the workers again from the last checkpoint, or choose an algorithm that continues without a worker"
        " (`paceline algorithms --tolerates kill`)."
    )

    def __init__(
        self,
        # A process group of all workers whose own deadline is longer than `timeout_s`; None: the default one.
        group: Any,
        store: Any,  # where workers announce that they give up; has its own prefix
        worker_id: int,  # this worker's rank in the group
        num_workers: int,
        *,
        timeout_s: float = 600.0,  # how long one operation may take
        # Sent messages and bytes are added here, counted as for ring algorithms (both backends' for large vectors).
        counts: Counts | None = None,
    ) -> None:
        self._group = group
        self._store = store
        self._roll_call = RollCall(store, worker_id, num_workers)
        self._worker_id = worker_id
        self._num_workers = num_workers
        self._place, self._size = worker_id, num_workers  # along an axis, others
        self._timeout_s = timeout_s
        self.members = range(num_workers)
        self.counts = counts if counts is not None else Counts()
        self._num_started = 0
        self._has_ended = False
        self.waited_s = 0.0
        self.on_wait: Callable[[], object] = lambda: None

    def all_reduce_mean(
        self, vector: torch.Tensor, weight: float, numbers: Sequence[float] = NO_NUMBERS
    ) -> list[float]:
        """Replaces `vector` (P,) by the weighted mean over all workers: sum_k (w_k / w_f) g_k / sum_k (w_k / w_f).

        f is the first worker with a weight; without any, the mean is zero. Returns the sums of the workers' numbers, which
        travel with the weights.

        Raises:
            WorkerLostError: a worker left, or did not arrive within the deadline.
        """
        told = torch.tensor([0.0] * self._num_workers + list(numbers), dtype=torch.float64)
        told[self._worker_id] = weight
        self.start_all_reduce(told).wait()
        weights, sums = told[: self._num_workers].tolist(), told[self._num_workers :].tolist()
        given = [w for w in weights if w]
        total = to_sum_type(vector)
        if weight:
            total.mul_(weight / given[0])
        else:
            total.zero_()
        self.start_all_reduce(total).wait()
        if len(given) > 1:
            total.div_(sum(w / given[0] for w in given))
        if total is not vector:
            vector.copy_(total)
        return sums

    def start_all_reduce(self, vector: torch.Tensor) -> Handle:
        self._count("all-reduce", vector)
        return self._start("all-reduce", vector, lambda: dist.all_reduce(vector, group=self._group, async_op=True))

    def start_reduce_scatter(self, vector: torch.Tensor, part: torch.Tensor) -> Handle:
        self._count("reduce-scatter", vector)
        if vector.device.type != "cpu":
            return self._start(
                "reduce-scatter", vector, lambda: _reduce_scatter(part, vector, group=self._group, async_op=True)
            )
        pieces = torch.empty_like(vector)  # of all workers, for this one
        return self._start(
            "reduce-scatter",
            vector,
            lambda: dist.all_to_all_single(pieces, vector, group=self._group, async_op=True),
            finish=lambda: add_up(pieces.view(self._size, -1).unbind(), part),
        )

    def start_all_gather(self, part: torch.Tensor, vector: torch.Tensor) -> Handle:
        self._count("all-gather", vector)
        return self._start("all-gather", vector, lambda: _all_gather(vector, part, group=self._group, async_op=True))

    def start_all_to_all(self, given: torch.Tensor, taken: torch.Tensor) -> Handle:
        self._count("all-to-all", given)
        return self._start(
            "all-to-all", given, lambda: dist.all_to_all_single(taken, given, group=self._group, async_op=True)
        )

    def broadcast(self, vector: torch.Tensor) -> None:
        """Replaces `vector` (n,) by worker 0's.

        Raises:
            WorkerLostError: a worker left, or did not arrive within the deadline.
        """
        self._start("broadcast", vector, lambda: dist.broadcast(vector, 0, group=self._group, async_op=True)).wait()

    def somebody_gave_up(self) -> bool:
        """Whether a worker has given up, in an operation along any axis, or the store is gone: waiting is then pointless."""
        return self._roll_call.somebody_gave_up()

    def end(self) -> None:
        """Says that this worker's program has ended, so that others stop waiting for its part in a round."""
        if not self._has_ended:
            self._has_ended = True
            self._say("ended", self._num_started)

    def leave(self) -> None:
        """Says that this worker's loop has ended, so that others stop waiting for it."""
        self.end()
        self._say("left", 1)

    def _say(self, what: str, number: int) -> None:
        try:
            self._store.set(f"{what}/{self._worker_id}", str(number))
        except RuntimeError:  # the store's holder has already left, so no worker asks
            return

    def _count(self, kind: str, vector: torch.Tensor, root: int = 0) -> None:
        count_operation(self.counts, kind, vector, self._place, self._size, root)

    def _start(
        self, name: str, vector: torch.Tensor, issue: Callable[[], Any], finish: Callable[[], None] | None = None
    ) -> Handle:
        self._num_started += 1
        label = f"{name} {self._num_started}"
        try:
            work = issue()
        except RuntimeError as error:  # a connection that broke before
            raise self._lost(label, error) from error
        return _GroupOperation(self, work, label, finish, in_slices=vector.device.type == "cpu")

    def wait_for(self, work: Any, label: str, *, in_slices: bool) -> None:
        begun_s = time.perf_counter()
        try:
            while True:
                self.on_wait()
                try:
                    if _is_done_soon(work, in_slices=in_slices):
                        self._roll_call.operation_ended()
                        return
                except RuntimeError as error:
                    if not in_slices or _has_failed(work):
                        raise self._lost(label, error) from error
                if time.perf_counter() - begun_s > self._timeout_s:
                    raise self._lost(label, f"not within {self._timeout_s:g} s")
                if self._roll_call.somebody_gave_up():
                    raise self._lost(label, "another worker has given up")
                if not self._has_ended and self._misses_somebody(int(label.split()[-1])):
                    raise self._lost(label, "another worker's loop has ended")
        finally:
            self.waited_s += time.perf_counter() - begun_s

    def _misses_somebody(self, number: int) -> bool:
        """Whether a worker's program has ended before it came to this operation."""
        others = [f"ended/{worker}" for worker in range(self._num_workers) if worker != self._worker_id]
        try:
            return any(self._store.check([key]) and int(self._store.get(key)) < number for key in others)
        except RuntimeError:  # the store is gone
            return True

    def _lost(self, label: str, why: object) -> WorkerLostError:
        """Gives up, collects which workers are present, and names the missing ones."""
        answers = self._roll_call.give_up(self.on_wait)
        if answers is None:
            return WorkerLostError(
                f"{label}: the workers' common store is gone, most likely with worker 0, which holds it unless the launcher"
                f" does. {self.remedy}"
            )
        present, left = answers
        missing = sorted(set(range(self._num_workers)) - present)
        if not missing:
            return WorkerLostError(f"{label}: all workers are there, but the operation failed: {_first_line(why)}.")
        ended = f"; {name_workers(sorted(left))} had ended its loop" if left else ""
        return WorkerLostError(
            f"{label}: {name_workers(sorted(present))} arrived, {name_workers(missing)} did not{ended}"
            f" ({_first_line(why)}). {self.remedy}"
        )


@dataclass(eq=False)
class _GroupOperation:
    collectives: DistributedCollectives
    work: Any
    label: str
    finish: Callable[[], None] | None
    in_slices: bool

    def wait(self) -> Sequence[int]:
        self.collectives.wait_for(self.work, self.label, in_slices=self.in_slices)
        if self.finish is not None:
            self.finish()
        return self.collectives.members


def _has_failed(work: Any) -> bool:
    """Whether an operation whose wait has raised has really failed; it may also complete just after its slice."""
    if not work.is_completed():
        return False
    try:
        work.wait(_SLICE)
    except RuntimeError:
        return True
    return False


def _is_done_soon(work: Any, *, in_slices: bool) -> bool:
    """Waits one slice of time for an operation; Gloo raises an error if it is not done by then.

    NCCL's own wait blocks only the stream, and its deadline ends the process, so NCCL operations are polled.
    """
    if in_slices:
        work.wait(_SLICE)
        return True
    until_s = time.perf_counter() + _SLICE.total_seconds()
    while not work.is_completed():
        if time.perf_counter() > until_s:
            return False
        time.sleep(_BETWEEN_QUERIES_S)
    work.wait()  # raises what went wrong
    return True


def _first_line(why: object) -> str:
    """The message proper: Gloo's errors begin with a source location and end with advice."""
    return str(why).strip().split("\n")[0].rpartition("] ")[2].split(". ")[0].rstrip(".")
