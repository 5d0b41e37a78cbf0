"""Synchronous SGD by all-reduce: gradients are averaged while backward still computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch

from paceline.algorithms.agreed_gradient import AgreedGradient
from paceline.algorithms.base import Algorithm, Closures
from paceline.algorithms.coded_gradient import work_coded
from paceline.algorithms.evaluations import Evaluations
from paceline.algorithms.plain import work_plainly
from paceline.algorithms.strips import OwnedStrips
from paceline.compression.carriers import check_carrier
from paceline.compression.codec import Codec, NoCodec
from paceline.compression.registry import codec_registry
from paceline.errors import UsageError
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
    Where a layout cuts layers over groups of workers, their gradients are averaged by the workers with the same shards only.
    Sharded: as many bytes, of which the parameters' half is not hidden; the optimizer's work and state are 1 / n per worker,
    with buffers of two vectors. In a loop of the user's own, one small all-reduce more per step: that nobody leaves it out.
    Clipping acts on the mean, which is there when `backward` returns; sharded, a loop may not clip.
    Use when: workers are equally fast, or `shares=auto`, and links are good; it is what asynchronous methods are compared to.
    Not: `lockstep`, which begins to average when backward has ended; `local-sgd`, which averages parameters, and rarely.

    Args:
        sharded: every worker owns a strip of each bucket: it gets the mean gradient of its strips (part-reduce), lets the
            optimizer step on them alone, and all collect the new parameters (part-broadcast). For optimizers that work element
            by element, with the same result. A loop sees no whole mean gradient then: it may not clip or unscale it.
        bucket_bytes: least size of the buckets; with more than 16 workers, so much for each 16 of them.
        shares: `auto` makes every worker's batch as large as the worker is fast: see `lockstep`.
        codec: what gradients look like on their way, such as `qsgd(bits=4)`; it pays where the network is slower than coding
            (`benchmarks/codecs.py`). Workers send each other coded pieces, and code the mean of their own piece anew; all
            decode the same bytes. Of several backward passes in one step each is coded, at the cost of as many bytes, time and
            rounding errors: mark all but the last with `worker.accumulate()`. Not with `sharded`.

    Differs from the papers: there means are unweighted: a worker without a batch would count as one with a gradient of zero.
    Das et al. let the part-broadcast overlap with the next forward pass; here a step ends with all parameters in place, so
    that a loop may look at its model at any time.

    Reference: Das et al., "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent", 2016, arXiv:1602.06709;
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, arXiv:2006.15704.
    """

    sharded: bool = False
    bucket_bytes: Annotated[int, COUNT] = BUCKET_BYTES
    shares: Literal["equal", "auto"] = "equal"
    codec: Codec = field(default_factory=NoCodec)

    lockstep: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_carrier(self.codec, "all-to-all", "all-reduce", codec_registry.spec(self.codec))
        if self.sharded and self.is_coded:
            raise UsageError(
                "all-reduce(sharded=true) cannot have a codec: new parameters travel as they are, since what rounding takes"
                " from them would be lost for good. Leave out one of the two."
            )

    @property
    def is_coded(self) -> bool:
        """Whether there is a codec."""
        return not isinstance(self.codec, NoCodec)

    @property
    def takes_shards(self) -> bool:
        """Where whole gradients are averaged as they are."""
        return not (self.sharded or self.is_coded or self.by_speed)

    @property
    def by_speed(self) -> bool:
        """With `shares=auto`."""
        return self.shares == "auto"

    @property
    def averages_in_backward(self) -> bool:
        """In buckets."""
        return True

    def closures(self, num_workers: int) -> Closures:
        """In rounds, where every worker gets the whole mean gradient."""
        if num_workers == 1:
            return "in place"
        return "once" if self.sharded or self.is_coded else "in rounds"

    @property
    def splits_update(self) -> bool:
        return self.sharded

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
            _work_sharded(replica, ports, ports.collectives, by_speed=self.by_speed)
        elif self.is_coded:
            work_coded(replica, ports, self.codec, by_speed=self.by_speed)
        else:
            _work_whole(replica, ports, ports.collectives, by_speed=self.by_speed)


def _work_whole(
    replica: Replica, ports: Ports[ReplicatedParameters], collectives: Collectives, *, by_speed: bool
) -> None:
    shared = ports.shared
    gradient = AgreedGradient(replica, ports, by_speed=by_speed)
    mean = _OverlappedMean(replica, collectives, gradient, ports)
    replica.evaluations = Evaluations(ports, gradient.rounds, average=lambda: None)
    for _ in gradient.steps():
        version = shared.version
        replica.gradient(at=shared.x, version=version, ready=mean.begin, finish=mean.finish)
        with shared.writing():
            replica.apply(to=shared.x)
            replica.applied(shared.advance(), gradient_version=version)


def _work_sharded(
    replica: Replica, ports: Ports[ReplicatedParameters], collectives: Collectives, *, by_speed: bool
) -> None:
    shared = ports.shared
    gradient = AgreedGradient(replica, ports, by_speed=by_speed)
    numbers = ports.worker_id, ports.num_workers, shared.x.numel()
    strips = OwnedStrips(replica, collectives, gradient, *numbers, ports.moved)
    for _ in gradient.steps():
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
    types travel as float32. The padding of the last bucket adds up the numbers of `AgreedGradient`.

    Shards of a layout are averaged across groups, as the gradients of the mean loss of a group's rows, which all count.
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
        self._shards = ports.shards
        self._num_begun = 0  # elements
        self._unit = 1.0
        # A bucket, what travels, its handle (None: nobody else has these shards), and whether all workers have it.
        self._under_way: list[tuple[torch.Tensor, torch.Tensor, Handle | None, bool]] = []

    def begin(self, bucket: torch.Tensor) -> None:
        """Starts averaging a bucket (n,) in place."""
        shards = self._shards
        is_common = shards is None or self._num_elements - self._num_begun - len(bucket) < shards.first
        samples = self._replica.samples
        factor = (samples if shards is None or is_common else shards.samples(samples)) / self._unit
        vector = to_sum_type(bucket)
        if factor != 1.0:
            vector.mul_(factor)  # in the first step, and in uneven ones
        if vector.numel():  # without elements, nothing but time is simulated
            if is_common and not any(common for *_, common in self._under_way):
                vector[-1] = factor
            self._num_begun += len(vector)
            if self._num_begun == self._num_elements:
                vector[0] = self._gradient.number()
        carrier = self._collectives if shards is None or is_common else shards.collectives
        handle = carrier.start_all_reduce(vector) if carrier is not None else None
        self._under_way.append((bucket, vector, handle, is_common))

    def finish(self) -> None:
        """Waits for the buckets in their order."""
        total: float | None = None
        said = 0.0
        shards: list[tuple[torch.Tensor, torch.Tensor]] = []  # which come first, before the total is known
        for number, (bucket, vector, summed, is_common) in enumerate(self._under_way, start=1):
            if summed is not None:
                summed.wait()
            if not is_common:
                shards.append((bucket, vector))
                continue
            if total is None and vector.numel():
                total = vector[-1].item()
                vector[-1] = 0.0
            if number == len(self._under_way) and vector.numel():
                said = vector[0].item()
                vector[0] = 0.0
            self._divide(bucket, vector, total or 0.0)
        for bucket, vector in shards:
            self._divide(bucket, vector, total or 0.0)
        self._under_way.clear()
        total = total or 0.0
        self._num_begun = 0
        self._replica.round_samples += round(total * self._unit)
        if total:
            self._unit *= 2.0 ** round(math.log2(total / self._num_workers))
        self._gradient.settle(said)

    def _divide(self, bucket: torch.Tensor, vector: torch.Tensor, total: float) -> None:
        if total:
            vector.div_(total)
        self._moved(2, of=bucket)  # of half types it is twice that, as is not known where only time is simulated
        if vector is not bucket:
            bucket.copy_(vector)
