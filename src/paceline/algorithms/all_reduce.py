"""Synchronous SGD by all-reduce: gradients are averaged while backward still computes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from paceline.algorithms.agreed_gradient import AgreedGradient
from paceline.algorithms.base import Algorithm
from paceline.algorithms.plain import work_plainly
from paceline.algorithms.strips import OwnedStrips
from paceline.ports.ports import Collectives, Handle, Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import BUCKET_BYTES, Needs, ReplicatedParameters
from paceline.specs.bounds import COUNT
from paceline.vectors.half_types import to_sum_type

__all__ = ["AllReduce"]


@dataclass(frozen=True, kw_only=True)
class AllReduce(Algorithm):
    """Synchronous SGD: all workers apply the mean of their gradients, which travel in buckets during the backward pass.

    A step of n workers is one step with all their samples as one batch: means are weighted by samples, so that an uneven or
    missing batch is no exception. Parameters stay equal on all workers, bit for bit.

    Costs per step: 2 (n - 1) / n times the parameters' size sent and received by each worker, hidden behind backward except
    for the first layers' part; gradients of half types travel as float32. Every step lasts as long as its slowest worker.
    In a round where a worker has no batch, the mean travels once more, not hidden: it is what the others' loops made of it.
    Sharded: as many bytes, of which the parameters' half is not hidden; the optimizer's work and state are 1 / n per worker,
    with buffers of two vectors. In a loop of the user's own, one small all-reduce more per step: that nobody leaves it out.
    Clipping acts on the mean, which is there when `backward` returns; sharded, a loop may not clip.
    Use when: workers are equally fast and links are good; it is what asynchronous methods are compared to.
    Not: `lockstep`, which begins to average when backward has ended; `local-sgd`, which averages parameters, and rarely.

    Args:
        sharded: every worker owns a strip of each bucket: it gets the mean gradient of its strips (part-reduce), lets the
            optimizer step on them alone, and all collect the new parameters (part-broadcast). For optimizers that work element
            by element, with the same result. A loop sees no whole mean gradient then: it may not clip or unscale it.
        bucket_bytes: least size of the buckets; with more than 16 workers, so much for each 16 of them.

    Differs from the papers: there means are unweighted: a worker without a batch would count as one with a gradient of zero.
    Das et al. let the part-broadcast overlap with the next forward pass; here a step ends with all parameters in place, so
    that a loop may look at its model at any time.

    Reference: Das et al., "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent", 2016, arXiv:1602.06709;
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, arXiv:2006.15704.
    """

    sharded: bool = False
    bucket_bytes: Annotated[int, COUNT] = BUCKET_BYTES

    lockstep: ClassVar[bool] = True

    @property
    def clips_before_the_mean(self) -> bool:
        """The mean is there when `backward` returns."""
        return False

    @property
    def takes_several_optimizers(self) -> bool:
        """Where each steps on whole parameters."""
        return not self.sharded

    @property
    def needs(self) -> Needs:
        """A replica per worker, and all-reduce."""
        return Needs("replicated", collectives=True, bucket_bytes=self.bucket_bytes)

    def work(self, replica: Replica, ports: Ports[ReplicatedParameters]) -> None:
        """x: this worker's parameters (P,), g: its gradient, which becomes the mean of all while backward computes."""
        assert ports.collectives is not None
        if ports.num_workers == 1:
            work_plainly(replica, ports)
        elif self.sharded:
            _work_sharded(replica, ports, ports.collectives)
        else:
            _work_whole(replica, ports, ports.collectives)


def _work_whole(replica: Replica, ports: Ports[ReplicatedParameters], collectives: Collectives) -> None:
    shared = ports.shared
    gradient = AgreedGradient(replica, ports)
    mean = _OverlappedMean(replica, collectives, gradient, ports)
    for _ in replica.steps():
        version = shared.version
        replica.gradient(at=shared.x, version=version, ready=mean.begin, finish=mean.finish)
        if mean.num_absent:  # they must be told what the others' loops have made of the mean, such as to clip it
            mean.meet(steps=True)
            gradient.average(weight=float(replica.samples > 0))
        with shared.writing():
            replica.apply(to=shared.x)
            replica.applied(shared.advance(), gradient_version=version)


def _work_sharded(replica: Replica, ports: Ports[ReplicatedParameters], collectives: Collectives) -> None:
    shared = ports.shared
    gradient = AgreedGradient(replica, ports)
    numbers = ports.worker_id, ports.num_workers, shared.x.numel()
    strips = OwnedStrips(replica, collectives, gradient, *numbers, ports.moved)
    for _ in replica.steps():
        version = shared.version
        replica.gradient(at=shared.x, version=version, ready=strips.begin, finish=strips.finish)
        strips.update(shared.x)
        with shared.writing():
            strips.copy_to(shared.x)
            replica.applied(shared.advance(), gradient_version=version)


class _OverlappedMean:
    """sum_k (w_k / u) g_k / sum_k (w_k / u), w_k: worker k's samples, u: a unit that all workers know.

    The unit is the power of two nearest to the mean weight of the round before, so that factors are near 1, exactly 1 for
    the usual batch sizes, and never round: whatever the unit, the result has the same bits.

    The weights are added up in the padding of the first bucket, which holds them exactly, up to 2^24 samples: buckets of half
    types travel as float32. The padding of the last bucket adds up how many workers have other parameters with gradients than
    before, and how many have no batch.

    Attributes:
        num_absent: workers without a batch.
    """

    def __init__(
        self, replica: Replica, collectives: Collectives, gradient: AgreedGradient, ports: Ports[ReplicatedParameters]
    ) -> None:
        self._replica = replica
        self._collectives = collectives
        self._gradient = gradient
        self._num_workers = ports.num_workers
        self._num_elements = ports.shared.x.numel()
        self._moved = ports.moved
        self._num_begun = 0  # elements
        self._unit = 1.0
        self._under_way: list[tuple[torch.Tensor, torch.Tensor, Handle]] = []  # bucket, what travels, its handle
        self.num_absent = 0

    def meet(self, *, steps: bool) -> None:
        """After the mean of a round in which some have no batch all step, or nobody does and all make another pass."""
        self._gradient.rounds.meet(steps=steps)
        self.num_absent = 0

    def begin(self, bucket: torch.Tensor) -> None:
        """Starts averaging a bucket (n,) in place."""
        if self.num_absent:
            self.meet(steps=False)
        factor = self._replica.samples / self._unit
        vector = to_sum_type(bucket)
        if factor != 1.0:
            vector.mul_(factor)  # in the first step, and in uneven ones
        if vector.numel():  # without elements, nothing but time is simulated
            if not self._under_way:
                vector[-1] = factor
            self._num_begun += len(vector)
            if self._num_begun == self._num_elements:
                vector[0] = self._gradient.changed() + (self._num_workers + 1) * (not self._replica.samples)
        self._under_way.append((bucket, vector, self._collectives.start_all_reduce(vector)))

    def finish(self) -> None:
        """Waits for the buckets in their order."""
        total = said = 0.0
        for number, (bucket, vector, summed) in enumerate(self._under_way, start=1):
            summed.wait()
            if number == 1 and vector.numel():
                total = vector[-1].item()
                vector[-1] = 0.0
            if number == len(self._under_way) and vector.numel():
                said = vector[0].item()
                vector[0] = 0.0
            if total:
                vector.div_(total)
            self._moved(2, of=bucket)  # of half types it is twice that, as is not known where only time is simulated
            if vector is not bucket:
                bucket.copy_(vector)
        self._under_way.clear()
        self._num_begun = 0
        self._replica.round_samples += round(total * self._unit)
        if total:
            self._unit *= 2.0 ** round(math.log2(total / self._num_workers))
        self.num_absent, num_changed = divmod(said, 1 + self._num_workers)
        self._gradient.settle(num_changed)
