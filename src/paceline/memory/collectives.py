"""All-reduce among workers on one machine: every worker reduces its part of the vector, then all copy all parts."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.errors import WorkerLostError, name_workers
from paceline.memory.atomics import load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.segment import LINE_BYTES, PAGE_BYTES, Layout
from paceline.memory.segment_part import PartPlan, SegmentPart
from paceline.memory.waiting import raise_if_stopped, wait_briefly, wake
from paceline.optim.half_types import add_up, mean_into, sum_type, to_sum_type
from paceline.ports.ports import NO_NUMBERS, NUM_NUMBERS, Counts, Handle
from paceline.ports.rooted import count_operation
from paceline.ports.started import CarriedOutTogether, Operation

_BYTES_PER_LINE_LOST = 2**16  # a step's buckets fit into one round if they are this large: each begins a line
_EXTRA_BYTES = 16 * LINE_BYTES  # for a few numbers that are reduced in the same round as the vectors
_DIED = "has left the run (killed, or its loop ended earlier)"
_GATHERS = ("all-gather", "all-to-all")
_NEED_ALL = ("reduce-scatter", "broadcast", "reduce")  # their pieces and roots belong to fixed workers
_MOST_AREAS = 2**16  # that are kept; each bucket has one for every worker
_STRIP_ELEMENTS = 16  # each worker's piece of a vector may be padded to a multiple of this

_REMEDY = (
    "Resume the run from its last checkpoint (`--resume RUN`, in Python `resume=`), or choose an algorithm that continues "
    "without a worker (`paceline algorithms --tolerates kill`)."
)


class SharedMemoryCollectives(SegmentPart[PartPlan], CarriedOutTogether):
    """Weighted means over all workers in lockstep; implements `RootedCollectives`.

    Per call: two barriers; each worker copies its vector in and the mean out, and reads one vector's worth in all for its
    own part. Memory: `num_workers + 1` vectors.

    An operation needs every member. A worker that is declared dead counts in a round if it had reached the round's first
    barrier: its vector is then whole, and the others reduce the part that it owed. All survivors see the same arrivals of a
    dead worker, so they agree without a message on whose vectors count. Whoever left in another way, or does not arrive in
    time, ends the run with `WorkerLostError`. A dead worker's replacement takes part once the members `let_in` it. A run that
    is being stopped ends between two rounds: waiters leave only once another worker has left, so that all have made the same
    updates.

    The mean is `sum_k (w_k / w_f) * g_k / sum_k (w_k / w_f)`, where f is the first worker with a weight and sums run
    in the order of worker ids. With equal weights all factors are exactly 1, so it is the plain sum divided by
    their number; and weights that are sample counts do not overflow any product. One worker
    computes each component, so all get the same bits. A single weighted vector is copied, bit for bit. Without any
    weight the mean is zero. With `num_workers == 1` nothing is touched. Half types are added up in float32.

    Started operations run at the first `wait`, all together in rounds of up to P elements: the same cores compute, so there
    is nothing to overlap with, and a round has two barriers however many operations it contains.

    Args:
        names: the participants' ids in the run, if they are only some of its workers.

    Attributes:
        members: the workers whose vectors the last operation contains; those that are alive, as far as this worker knows.
        waited_s: seconds spent at barriers; the caller reads it and sets it back to 0.
        counts: messages and bytes are added here, as if they were sent; None: nothing is counted.

    Reference: Das et al., "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent", 2016,
        arXiv:1602.06709 (part-reduce and part-broadcast).
    """

    def __init__(self, *place: Any, timeout_s: float = 600.0, names: Sequence[int] | None = None, **named: Any) -> None:
        SegmentPart.__init__(self, *place, **named)
        CarriedOutTogether.__init__(self)
        segment, plan = self._segment, self._plan
        num_workers = self._num_workers = plan.num_participants
        self._gradients = [self._vector(f"gradient_{worker}") for worker in range(num_workers)]
        self._mean = self._vector("mean")
        self._weights = segment.array(plan.at["weights"], num_workers, np.float64)
        self._numbers = segment.array(plan.at["numbers"], (num_workers, NUM_NUMBERS), np.float64)
        self._arrivals = self._word("arrivals")
        self._losses = self._word("losses")
        self._worker_id = self._participant
        self._timeout_s = timeout_s  # how long to wait for a worker that has not been declared lost
        self._names = names if names is not None else range(num_workers)
        self._num_barriers = self._num_rounds = 0
        self._capacity_bytes = _size_bytes(plan)
        self._members = self.members = tuple(range(num_workers)) if not self._incarnation else ()
        self._incarnations = [0] * num_workers
        self._part = slice(0, 0)
        self._divide_among_members()
        self._areas: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}
        self.waited_s = 0.0
        self.counts: Counts | None = None

    @staticmethod
    def areas(layout: Layout, plan: PartPlan) -> dict[str, int]:
        """A vector for each worker and one for the mean; weights and accompanying numbers; words of each worker."""
        num_workers, size_bytes = plan.num_participants, _size_bytes(plan)
        vectors = [*(f"gradient_{worker}" for worker in range(num_workers)), "mean"]
        return {
            **{name: layout.reserve(f"lockstep.{name}", size_bytes, PAGE_BYTES) for name in vectors},
            "weights": layout.reserve("lockstep.weights", num_workers * 8),
            "numbers": layout.reserve("lockstep.numbers", num_workers * NUM_NUMBERS * 8),
            "arrivals": layout.words("lockstep.arrivals", num_workers),  # how many barriers it has come to
            # Of the last incarnation i that has left the run, 2 i + 1, or has died, 2 i + 2.
            "losses": layout.words("lockstep.losses", num_workers),
        }

    def all_reduce_mean(
        self, vector: torch.Tensor, weight: float, numbers: Sequence[float] = NO_NUMBERS
    ) -> list[float]:
        """Replaces `vector` (P,) by the weighted mean over all workers; returns the sums of their numbers.

        Raises:
            WorkerLostError: a worker was declared lost, or did not arrive within `timeout_s`.
            RunStopped: the run is being stopped, and a worker has left it.
        """
        if self._num_workers == 1:
            return list(numbers)
        if self.counts is not None:
            count_operation(self.counts, "all-reduce", vector, self._worker_id, self._num_workers)
        self.finish(self._num_started)
        # The others read this memory before the last barrier of the last call, which all have passed.
        self._weights[self._worker_id] = weight
        self._numbers[self._worker_id] = numbers
        if weight:
            self._gradients[self._worker_id].copy_(vector)
        self._gather_members()
        self._reduce(self._part, self._total)
        if self._total is not self._mean_part:
            self._mean_part.copy_(self._total)
        said = self._numbers.tolist()
        totals = list(map(math.fsum, zip(*[said[worker] for worker in self.members], strict=True)))
        dead = self._barrier()
        vector.copy_(self._mean)
        for worker in dead:
            part = self._part_of(worker, len(vector))
            sums = to_sum_type(vector[part])
            self._reduce(part, sums)
            vector[part].copy_(sums)
        self._part_from(dead)
        return totals

    def _start(self, operation: Operation) -> Handle:
        if self.counts is not None:
            kind, vector, _, root = operation
            count_operation(self.counts, kind, vector, self._worker_id, self._num_workers, root)
        return super()._start(operation)

    def _carry_out(self, operations: list[Operation]) -> None:
        if self._num_workers == 1:
            super()._carry_out(operations)
            return
        rounds = self._rounds(operations)
        for number, round_ in enumerate(rounds):
            before = self.members
            self._run_round(round_)
            # Operations that belong together now have parts of other workers.
            if number and self.members != before and any(one.kind not in _GATHERS for one in operations):
                raise self._lost(set(before) - set(self.members), _DIED)

    def _rounds(self, operations: list[Operation]) -> list[list[tuple[int, Operation]]]:
        """Operations with their offsets in the shared areas, as many per round as fit."""
        rounds: list[list[tuple[int, Operation]]] = [[]]
        offset = 0
        for operation in operations:
            source = operation.part if operation.kind == "all-gather" else operation.vector
            size_bytes = -(-source.numel() * source.itemsize // LINE_BYTES) * LINE_BYTES
            assert size_bytes <= self._capacity_bytes, "an operation on more elements than the run has parameters"
            if offset + size_bytes > self._capacity_bytes:
                rounds.append([])
                offset = 0
            rounds[-1].append((offset, operation))
            offset += size_bytes
        return rounds

    def _run_round(self, operations: list[tuple[int, Operation]]) -> None:
        me = self._worker_id
        for offset, operation in operations:
            source = operation.part if operation.kind == "all-gather" else operation.vector
            if operation.kind != "broadcast" or operation.root == me:
                self._area(me, offset, source).copy_(source)
        self._gather_members()
        if len(self.members) < self._num_workers and any(one.kind in _NEED_ALL for _, one in operations):
            raise self._lost(set(range(self._num_workers)) - set(self.members), _DIED)
        for offset, (kind, vector, part, root) in operations:
            if kind in ("broadcast", "reduce"):
                if kind == "broadcast" and root != me:
                    vector.copy_(self._area(root, offset, vector))
                elif kind == "reduce" and root == me:
                    self._add_up(offset, vector, slice(None), vector)
                continue
            if kind == "all-gather":
                pieces = vector.chunk(self._num_workers)
                for worker in self.members:
                    pieces[worker].copy_(self._area(worker, offset, part))
                continue
            if kind == "all-to-all":
                pieces = part.chunk(self._num_workers)
                for worker in self.members:
                    pieces[worker].copy_(self._area(worker, offset, vector).chunk(self._num_workers)[me])
                continue
            mine = self._part_of(me, vector.numel())
            self._add_up(
                offset, vector, mine, part if kind == "reduce-scatter" else self._area(-1, offset, vector)[mine]
            )
        dead = self._barrier()
        for offset, (kind, vector, *_) in operations:
            if kind == "all-reduce":
                vector.copy_(self._area(-1, offset, vector))
                for worker in dead:
                    part = self._part_of(worker, vector.numel())
                    self._add_up(offset, vector, part, vector[part])
        self._part_from(dead)

    def _add_up(self, offset: int, like: torch.Tensor, part: slice, out: torch.Tensor) -> None:
        add_up([self._area(worker, offset, like)[part] for worker in self.members], out)

    # Members

    def living(self) -> Sequence[int]:
        """Waits for all members, and returns those that are alive; operations that have been started are not carried out."""
        if self._num_workers > 1:
            self._gather_members()
        return self.members

    def kept(self, worker: int) -> int:
        return 0

    def place(self) -> int:
        """How many barriers this worker has come to: all members have the same number at the same place."""
        return self._num_barriers

    def end_of(self, worker: int) -> dict[str, int]:
        """For replays: the last barrier that a dead worker, or else its predecessor, reached."""
        return {"left_at": load(self._arrivals + worker * LINE_BYTES)}

    def _gather_members(self) -> None:
        """Waits until all workers have brought their vectors, or have died: `members` are those whose vectors are there."""
        self._num_rounds += 1
        self._part_from(self._barrier(), is_passed=True)
        self.members = self._members

    def _part_from(self, dead: list[int], *, is_passed: bool = False) -> None:
        """Goes on without workers that have died; unless `is_passed`, once all others have done what these owed."""
        if not dead:
            return
        self._members = tuple(one for one in self._members if one not in dead)
        self._divide_among_members()
        if not is_passed:
            self._part_from(self._barrier(), is_passed=True)

    def let_in(self, newcomers: Mapping[int, int]) -> dict[str, Any]:
        self._members = self.members = tuple(sorted({*self._members, *newcomers}))
        for worker, incarnation in newcomers.items():
            self._incarnations[worker] = incarnation
        self._divide_among_members()
        names = ("_members", "_incarnations", "_num_barriers", "_num_rounds")
        return {name: getattr(self, name) for name in names}

    def enter(self, given: dict[str, Any]) -> None:
        """Takes part from the next operation on, with what `let_in` returned."""
        vars(self).update(given)
        self.members = self._members
        self._divide_among_members()

    def _divide_among_members(self) -> None:
        if self._worker_id in self._members:  # it is no observer
            self._part = self._part_of(self._worker_id, self._plan.num_parameters, self._members)
        self._mean_part = self._mean[self._part]
        # What its mean is made of: the same memory, or wider memory of its own.
        self._total = to_sum_type(self._mean_part)

    def _part_of(self, worker: int, num_elements: int, members: Sequence[int] = ()) -> slice:
        """What this worker reduces of a vector."""
        members = members or self.members
        place = members.index(worker)
        return slice(num_elements * place // len(members), num_elements * (place + 1) // len(members))

    def _area(self, worker: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """Where a worker (-1: the result) keeps a vector of this length and type; made once."""
        key = (worker, offset, like.numel(), like.dtype)
        area = self._areas.get(key)
        if area is None:
            if len(self._areas) > _MOST_AREAS:  # as each round's rows have another length
                self._areas.clear()
            begin = self._plan.at["mean" if worker < 0 else f"gradient_{worker}"]
            area = self._areas[key] = self._segment.tensor(begin + offset, like.numel(), like.dtype)
        return area

    def mark_lost(self, worker_id: int, incarnation: int = 0, *, is_dead: bool = False) -> None:
        """Declares this worker lost, of which workers that wait for it hear at once.

        The others go on without it if it `is_dead`, as its process has ended. Else they get `WorkerLostError`.
        """
        word, left = self._losses + worker_id * LINE_BYTES, 2 * incarnation + 1
        if load(word) < left:
            store(word, left + is_dead)
        wake(self._arrivals + worker_id * LINE_BYTES)

    def _reduce(self, part: slice, out: torch.Tensor) -> None:
        weights = self._weights.tolist()
        mean_into(out, [(self._gradients[one][part], weights[one]) for one in self.members if weights[one]])

    def _barrier(self) -> list[int]:
        """Waits for all members; returns those that have died before they came."""
        self._num_barriers += 1
        own = self._arrivals + self._worker_id * LINE_BYTES
        store(own, self._num_barriers)
        wake(own)
        fail_point("lockstep.arrived")
        if not self._missing():
            return []
        began_s = time.perf_counter()
        try:
            return [worker for worker in self._members if not self._comes(worker, began_s)]
        finally:
            self.waited_s += time.perf_counter() - began_s

    def _comes(self, worker: int, began_s: float) -> bool:
        """Waits for a worker; returns whether it has come, or else has died."""
        word = self._arrivals + worker * LINE_BYTES
        while (arrived := load(word)) < self._num_barriers:
            left, loss = 2 * self._incarnations[worker] + 1, load(self._losses + worker * LINE_BYTES)
            if loss >= left:
                # It may have arrived and died between our two looks; then this barrier is complete.
                if load(word) >= self._num_barriers:
                    return True
                if loss > left:
                    return False
                raise_if_stopped(self._abort)
                raise self._lost(self._missing(), _DIED)
            if time.perf_counter() - began_s > self._timeout_s:
                raise self._lost(self._missing(), f"did not arrive within {self._timeout_s:g} s")
            wait_briefly(word, arrived)
        return True

    def is_dead(self, worker: int, incarnation: int) -> bool:
        return load(self._losses + worker * LINE_BYTES) > 2 * incarnation + 1

    def _missing(self) -> list[int]:
        return [one for one in self._members if load(self._arrivals + one * LINE_BYTES) < self._num_barriers]

    def _lost(self, missing: Collection[int], what_happened: str) -> WorkerLostError:
        present = [name for worker, name in enumerate(self._names) if worker in self._members and worker not in missing]
        absent = [self._names[worker] for worker in sorted(missing)]
        return WorkerLostError(
            f"all-reduce {self._num_rounds}: {name_workers(present)} arrived, {name_workers(absent)} did not; "
            f"one of the missing {what_happened}. {_REMEDY}"
        )


def _size_bytes(plan: PartPlan) -> int:
    """Size of one area: the parameters' vector in one operation; sums of half types are float32."""
    elements = plan.num_parameters + plan.num_participants * _STRIP_ELEMENTS
    size_bytes = elements * sum_type(plan.dtype).itemsize
    return size_bytes + size_bytes // _BYTES_PER_LINE_LOST * LINE_BYTES + _EXTRA_BYTES
