"""Synchronous SGD by all-reduce: gradients are averaged while backward still computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch

from paceline.algorithms.base import Algorithm, Closures, Slow
from paceline.algorithms.coded_gradient import work_coded
from paceline.algorithms.evaluations import Evaluations
from paceline.algorithms.gradient_round import GradientRound
from paceline.algorithms.part_reduce import PartReduce
from paceline.algorithms.plain import work_plainly
from paceline.algorithms.shares import waiting_less
from paceline.algorithms.table_mean import TableMean
from paceline.compression.codec import Codec, NoCodec
from paceline.compression.registry import check_carrier
from paceline.errors import UsageError
from paceline.optim.half_types import to_sum_type
from paceline.ports.ports import NUM_NUMBERS, Collectives, Handle, Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import BUCKET_BYTES, Needs, ReplicatedParameters
from paceline.specs.bounds import COUNT


@dataclass(frozen=True, kw_only=True)
class AllReduce(Algorithm):
    """Synchronous SGD: all workers apply the mean of their gradients, which travel in buckets during the backward pass.

    A step of n workers equals one step on all their samples as one batch, also with uneven or missing batches: means are
    weighted by samples. Parameters stay equal on all workers, bit for bit.

    Costs per step: 2 (n - 1) / n times the parameters' size sent and received by each worker, hidden behind backward except
    for the first layers' part; gradients of half types travel as float32. Every step takes as long as its slowest worker.
    If a layout shards layers over groups of workers, only workers with the same shards average their gradients.
    Sharded: as many bytes, but the parameters' half is not hidden; the optimizer's work and state are 1 / n per worker,
    with buffers of two vectors. In a user's own loop, one more small all-reduce per step checks that every worker takes part.
    Sparse gradients of embeddings: two small all-gathers more, and only the rows that any worker's gradient has are averaged,
    after backward; not sharded, and without a codec.
    Clipping acts on the mean, which is ready when `backward` returns; sharded, a loop must not clip.
    Use when: workers are equally fast, or `shares=auto`, and links are good; the baseline for asynchronous methods.
    Not: `lockstep`, which starts averaging after backward; `local-sgd`, which averages parameters, and rarely.

    Args:
        sharded: every worker owns a strip of each bucket: it gets the mean gradient of its strips (part-reduce), steps the
            optimizer on them alone, and all collect the new parameters (part-broadcast). For element-wise optimizers, with the
            same result. A loop never sees the whole mean gradient, so it must not clip or unscale it.
        bucket_bytes: least size of the buckets; with more than 16 workers, this much per 16 workers.
        shares: `auto` makes batch sizes proportional to each worker's speed: see `lockstep`.
        codec: compresses gradients, such as `qsgd(bits=4)`; it pays off if the network is slower than coding
            (`benchmarks/codecs.py`). Workers exchange coded pieces, and each re-encodes the mean of its own piece; all decode
            the same bytes. Several backward passes in one step are coded separately and multiply bytes, time and rounding
            errors: mark all but the last with `worker.accumulate()`. Not with `sharded`.

    Differs from the papers: their means are unweighted, so that a worker without a batch counts as a gradient of zero. Das et
    al. overlap the part-broadcast with the next forward pass; here a step ends with all parameters in place, so that a loop
    can read its model at any time.

    Reference: Das et al., "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent", 2016, arXiv:1602.06709;
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, arXiv:2006.15704.
    """

    sharded: bool = False
    bucket_bytes: Annotated[int, COUNT] = BUCKET_BYTES
    shares: Literal["equal", "auto"] = "equal"
    codec: Codec = field(default_factory=NoCodec)

    tolerates: ClassVar[tuple[str, ...]] = ("kill under launch",)
    lockstep: ClassVar[bool] = True
    averages_in_backward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_carrier(self.codec, "all-to-all", "all-reduce")
        if self.sharded and self.is_coded:
            raise UsageError(
                "all-reduce(sharded=true) cannot have a codec: it sends new parameters, and a codec's rounding errors "
                "in them would never be corrected. Leave out one of the two."
            )

    @property
    def takes_shards(self) -> bool:
        return not (self.sharded or self.is_coded or self.by_speed)

    @property
    def survivors_continue(self) -> bool:
        return not self.sharded

    @property
    def by_speed(self) -> bool:
        return self.shares == "auto"

    def waiting_less(self, slow: Slow, num_workers: int) -> Algorithm | str | None:
        return waiting_less(self, slow)

    def closures(self, num_workers: int) -> Closures:
        """In rounds, if every worker gets the whole mean gradient."""
        if num_workers == 1:
            return "in place"
        return "once" if self.sharded or self.is_coded else "in rounds"

    @property
    def splits_update(self) -> bool:
        return self.sharded

    @property
    def takes_several_optimizers(self) -> bool:
        return not self.sharded

    @property
    def needs(self) -> Needs:
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
    gradient = GradientRound(replica, ports, by_speed=by_speed)
    if replica.tables and ports.shards is None:
        begin, finish = None, TableMean(replica, ports, gradient, gradient.end_pass).average
    else:
        mean = _OverlappedMean(replica, collectives, gradient, ports)
        begin, finish = mean.begin, mean.finish
    replica.evaluations = Evaluations(ports, gradient.round, average=lambda: None)
    for _ in gradient.steps():
        version = shared.version
        replica.gradient(at=shared.x, version=version, ready=begin, finish=finish)
        if gradient.is_void:
            replica.absent(version)
            continue
        with shared.writing():
            replica.apply(to=shared.x)
            replica.applied(shared.advance(), gradient_version=version)


def _work_sharded(
    replica: Replica, ports: Ports[ReplicatedParameters], collectives: Collectives, *, by_speed: bool
) -> None:
    shared = ports.shared
    gradient = GradientRound(replica, ports, by_speed=by_speed)
    strips = PartReduce(replica, ports, collectives, gradient)
    for _ in gradient.steps():
        version = shared.version
        replica.gradient(at=shared.x, version=version, ready=strips.begin, finish=strips.finish)
        strips.update(shared.x)
        with shared.writing():
            strips.copy_to(shared.x)
            replica.applied(shared.advance(), gradient_version=version)


class _OverlappedMean:
    """sum_k (w_k / u) g_k / sum_k (w_k / u), w_k: worker k's samples, u: a unit that all workers know.

    The weights travel in the first bucket, whose last element is no parameter's, so that each sum is divided as it comes. The
    header travels in the last bucket, whose first elements are no parameter's either. Buckets of half types travel as float32.

    Shards of a layout are averaged across groups, as the gradients of the mean loss of a group's rows, which all count.
    """

    def __init__(
        self, replica: Replica, collectives: Collectives, gradient: GradientRound, ports: Ports[ReplicatedParameters]
    ) -> None:
        self._replica = replica
        self._collectives = collectives
        self._gradient = gradient
        self._num_elements = ports.shared.x.numel()
        self._moved = ports.moved
        self._shards = ports.shards
        self._num_begun = self._num_of_shards = 0  # elements, buckets
        # Bucket, the vector sent, and its handle; None: no other worker has these shards.
        self._under_way: list[tuple[torch.Tensor, torch.Tensor, Handle | None]] = []

    def begin(self, bucket: torch.Tensor) -> None:
        """Starts averaging a bucket (n,) in place."""
        self._num_begun += len(bucket)
        shards, carrier, samples = self._shards, self._collectives, self._replica.samples
        is_shard = shards is not None and self._num_elements - self._num_begun >= shards.first
        if shards is not None and is_shard:
            carrier, samples = shards.collectives, shards.samples(samples)
        factor, vector = samples / self._gradient.unit, to_sum_type(bucket)
        if factor != 1.0:
            vector.mul_(factor)  # in the first step, and in uneven ones
        if is_shard:
            self._num_of_shards += 1
        elif vector.numel():  # no elements if only time is simulated
            if len(self._under_way) == self._num_of_shards:
                vector[-1] = factor
            if self._num_begun == self._num_elements:
                numbers = self._gradient.header().numbers
                if any(numbers):  # rarely, after the first rounds
                    vector[:NUM_NUMBERS] = vector.new_tensor(numbers)
        self._under_way.append((bucket, vector, carrier.start_all_reduce(vector) if carrier is not None else None))

    def finish(self) -> None:
        """Waits for the buckets in their order."""
        gradient, heard, total = self._gradient, None, None
        received: list[tuple[torch.Tensor, torch.Tensor]] = []  # shards come before the total is known
        for place, (bucket, vector, summed) in enumerate(self._under_way, start=1):
            if summed is not None:
                summed.wait()
            received.append((bucket, vector))
            if place <= self._num_of_shards:
                continue
            if total is None and vector.numel():
                total = vector[-1].item()
                vector[-1] = 0.0
            if place == len(self._under_way) and vector.numel():
                numbers = vector[:NUM_NUMBERS].tolist()
                heard = gradient.heard_from(numbers)
                if any(numbers):
                    vector[:NUM_NUMBERS] = 0.0
            for one in received:
                self._divide(*one, total)
            received.clear()
        buckets = [bucket for bucket, *_ in reversed(self._under_way)]
        self._under_way.clear()
        self._num_begun = self._num_of_shards = 0
        samples = total * gradient.unit if total is not None else None
        gradient.end(heard, samples, lambda: torch.cat(buckets))

    def _divide(self, bucket: torch.Tensor, vector: torch.Tensor, total: float | None) -> None:
        if total:
            vector.div_(total)
        self._moved(2, of=bucket)  # half types move twice that, unknown if only time is simulated
        if vector is not bucket:
            bucket.copy_(vector)
