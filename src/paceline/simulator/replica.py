"""Simulated workers' replicas: the real forward, backward and optimizer step, with virtual durations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.data.plan import BatchSource
from paceline.loop.base_replica import BaseReplica
from paceline.loop.buckets import bucket_ranges
from paceline.loop.task_replica import TaskReplica
from paceline.optim.flat_parameters import FlatParameters
from paceline.optim.ranges import Ranges
from paceline.optim.settings import OptimizerSettings, SettingsGroup
from paceline.ports.replica import OnBucket, OnEnd, Piece
from paceline.simulator.hardware.core import SUM_VECTORS, Core
from paceline.simulator.memory import NoVector
from paceline.simulator.overlap import shares_until_complete
from paceline.system.torch_random import torch_state


class RandomStates:
    """One state of PyTorch's CPU generator per worker, swapped in when that worker loads data or computes.

    The rest of a simulation does not draw from it, so copying 5 KB twice per change of worker keeps the workers apart.
    Worker 0 continues from the present state.
    """

    def __init__(self) -> None:
        self._states: dict[int, torch.Tensor] = {}
        self._current = 0

    def begin(self, worker_id: int, seed: int) -> None:
        """Gives another worker, or a worker's next incarnation, its own seed."""
        self._states[worker_id] = torch.Generator().manual_seed(seed).get_state()
        if self._current == worker_id:
            self._current = -1

    def enter(self, worker_id: int) -> None:
        if worker_id == self._current:
            return
        self._states[self._current] = torch_state()
        self._current = worker_id
        torch.set_rng_state(self._states[worker_id])


class OwnBuffers:
    """Each worker's own copy of the buffers (running statistics) of the one model that serves all workers."""

    def __init__(self, model: nn.Module, num_workers: int) -> None:
        self._bound = list(model.buffers())
        self._initial = [buffer.data.clone() for buffer in self._bound]
        self._own = [self._fresh() for _ in range(num_workers)]

    def _fresh(self) -> list[torch.Tensor]:
        return [one.clone() for one in self._initial]

    def begin(self, worker_id: int) -> None:
        """Gives a worker's next incarnation the model's initial buffers."""
        self._own[worker_id] = self._fresh()

    def enter(self, worker_id: int) -> None:
        for buffer, own in zip(self._bound, self._own[worker_id], strict=True):
            buffer.data = own


_NO_OPTIMIZER = OptimizerSettings("SGD", (SettingsGroup((), (("lr", 0.0),)),))


class Timed(BaseReplica):
    """Base of simulated replicas, before the class whose operations it lets take time: records memory traffic."""

    _core: Core

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        begun_s = self._now_s()
        self._core.copy()
        self._apply_s += self._now_s() - begun_s
        return super().copy(x)

    def update_since(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        self._core.move(SUM_VECTORS)
        return super().update_since(before, after)  # pyright: ignore[reportAttributeAccessIssue]

    def apply_pieces(self, to: torch.Tensor, g: torch.Tensor, pieces: Sequence[Piece]) -> None:
        begun_s = self._now_s()
        self._core.update(self._core.cluster.workers)
        self._apply_s += self._now_s() - begun_s
        super().apply_pieces(to, g, pieces)  # pyright: ignore[reportAttributeAccessIssue]

    def _record(self, applied_version: int, gradient_version: int, failed_publishes: int) -> None:
        self._core.scheduler.catch_up()
        self._apply_s += self._core.moved_s
        self._core.moved_s = 0.0
        super()._record(applied_version, gradient_version, failed_publishes)


class _Overlapping(Timed):
    """Base of a task's replicas: sends buckets as they complete."""

    _leaving: Sequence[torch.Tensor] = ()  # the buckets of the gradient
    _parts: Sequence[float] = ()  # the share of computing until each is complete

    def _leave_in(self, buckets: Sequence[torch.Tensor], sizes: Sequence[float]) -> None:
        self._leaving, self._parts = buckets, shares_until_complete(sizes)

    def _compute(self, ready: OnBucket, finish: OnEnd) -> None:
        """Waits for forward and backward to pass; with `ready`, sends buckets as they complete, if that matters."""
        if ready is not None and self.samples and self._core.overlaps:
            for number in self._core.compute_in_parts(self.samples, self._parts):
                self._gradient_ended_s = self._now_s()
                ready(self._leaving[number])
        else:
            if self.samples:
                self._core.compute(self.samples)
            self._gradient_ended_s = self._now_s()
            if ready is not None:
                for bucket in self._leaving:
                    ready(bucket)
        if finish is not None:
            finish()


class SimulatedReplica(_Overlapping, TaskReplica):
    """A `TaskReplica` whose steps take virtual time; one model serves all workers, each with its own optimizer.

    The gradient is that of the vector when its computation begins, and is ready when it ends. On a racing vector, updates
    and copies go block by block: each block is read or written in its state when its share of the time has passed. Other
    updates are written as a whole, at the end of their time.
    """

    def __init__(
        self,
        *task: Any,
        core: Core,
        random_states: RandomStates,
        num_blocks: int,  # blocks of an update or a copy; 1 if the vector cannot change meanwhile
        buffers: OwnBuffers | None = None,  # of all workers; None: one copy that all write
        **base: Any,
    ) -> None:
        super().__init__(*task, **base)
        self._buffers = buffers
        self._takes_own = False  # one model serves all workers
        self._core = core
        self._random_states = random_states
        self._num_blocks = num_blocks
        if self._flat is not None and num_blocks > 1:  # the optimizer then steps on one block at a time
            self._flat = FlatParameters(task[2], self._g, num_blocks)
            self.optimizer = self._flat.optimizer

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        begun_s = self._now_s()
        if self._private is None:
            self._private = torch.empty_like(x)
        size = x.numel()
        for block in range(self._num_blocks):
            self._core.copy(self._num_blocks)
            part = slice(size * block // self._num_blocks, size * (block + 1) // self._num_blocks)
            self._private[part] = x[part]
        self._apply_s += self._now_s() - begun_s
        return self._private

    def gradient(self, at: torch.Tensor, version: int, ready: OnBucket = None, finish: OnEnd = None) -> None:
        """Computes the gradient of the current `at` (P,); its buckets become ready as virtual compute time passes."""
        self._random_states.enter(self._core.worker_id)
        if self._buffers is not None:
            self._buffers.enter(self._core.worker_id)
        self._bind_gradients()
        super().gradient(at, version)
        if self._takes_rows:
            _ = self.g  # before another worker's gradient takes its place in the model
        if ready is not None and not self._leaving:
            ranges = bucket_ranges(self.binding, self._bucket_bytes)
            self._leave_in([self.g[begin:end] for begin, end in ranges], [end - begin for begin, end in ranges])
        self._compute(ready, finish)

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        """Applies one optimizer step to `to` (P,), block by block; plain SGD reads `of` as it goes."""
        begun_s = self._now_s()
        if of is not None:
            if not self._is_plain_sgd:
                self._core.copy()
            to.copy_(of)
        if self._rows is not None:
            self._make_dense()
        if self._is_plain_sgd:
            scale *= weight  # in the order in which real workers round
        elif weight != 1.0:
            self._g.mul_(weight)
        for block in range(self._num_blocks):
            self._core.update(self._num_blocks)
            if self._flat is not None:
                self._step_on(to, scale, block)
        if self._flat is None:
            self._bind_gradients()
            self._step_on(to, scale)
        self._count_apply(begun_s)


class TimedReplica(_Overlapping):
    """A replica without model and data, for timing only: the same waits as `SimulatedReplica`, on empty tensors."""

    def __init__(
        self,
        *,
        core: Core,
        batches: BatchSource,  # yields `(batch_number, samples)`
        num_blocks: int,
        bucket_sizes: Sequence[int],  # in bytes, of the gradient's buckets, in the order in which they leave
        # Whether an update is `x -= lr * g` and nothing else: one that copies then does so as it goes.
        is_plain_sgd: bool,
        **base: Any,
    ) -> None:
        super().__init__(binding=None, **base)  # type: ignore[arg-type]
        self._core = core
        self._batches = batches
        self._num_blocks = num_blocks
        self._is_plain_sgd = is_plain_sgd
        self.g = torch.empty(0)
        self.missing: Ranges = ()
        self._leave_in([NoVector(size) for size in bucket_sizes], bucket_sizes)

    def steps(self) -> Iterator[int]:
        while (batch := self._batches.next()) is not None:
            self.batch, self.samples = batch
            self._begin_step(self._now_s())
            yield self.step

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        begun_s = self._now_s()
        for _ in range(self._num_blocks):
            self._core.copy(self._num_blocks)
        self._apply_s += self._now_s() - begun_s
        return x

    def gradient(self, at: torch.Tensor, version: int, ready: OnBucket = None, finish: OnEnd = None) -> None:
        """Waits as long as a gradient takes; meanwhile `ready` gets vectors that stand for its buckets."""
        self._read_version = version
        self._gradient_started_s = self._now_s()
        self._compute(ready, finish)

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        begun_s = self._now_s()
        if of is not None and not self._is_plain_sgd:
            self._core.copy()
        for _ in range(self._num_blocks):
            self._core.update(self._num_blocks)
        self._count_apply(begun_s)

    def apply_pieces(self, to: torch.Tensor, g: torch.Tensor, pieces: Sequence[Piece]) -> None:
        begun_s = self._now_s()
        self._core.update(self._core.cluster.workers)
        self._count_apply(begun_s)

    def optimizer_settings(self) -> OptimizerSettings:
        return _NO_OPTIMIZER

    def update_since(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        self._core.move(SUM_VECTORS)
        return self.g
