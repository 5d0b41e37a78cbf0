"""The mean gradient through a codec: codes and sends buckets while backward still computes."""

from __future__ import annotations

from typing import Any

import torch

from paceline.algorithms.gradient_round import GradientRound
from paceline.algorithms.round_messages import Header
from paceline.compression.codec import Codec
from paceline.compression.coded_mean import CodedMean, without_memories
from paceline.compression.mean import Mean
from paceline.errors import WorkerLostError
from paceline.optim.ranges import Ranges, within
from paceline.ports.ports import Handle, Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import ReplicatedParameters

_LOST_TWICE = (
    "Two workers died one after the other in one step, and the means of its buckets contain different workers: resume the run"
    " from its last checkpoint."
)


def work_coded(replica: Replica, ports: Ports[ReplicatedParameters], codec: Codec, *, by_speed: bool = False) -> None:
    """x: this worker's parameters (P,), g: its gradient, which becomes the decoded mean of all.

    A step of several backward passes codes, after each pass, the decoded mean so far plus the new gradient; the error feedback
    of one pass goes into the next. Within `worker.accumulate()` passes only add up, and are coded once.
    """
    shared = ports.shared
    gradient = GradientRound(replica, ports, by_speed=by_speed)
    mean = _CodedGradient(replica, gradient, ports, codec)
    storage = ports.storage
    if storage is not None:
        mean.coded.load(storage.restore())
    for _ in gradient.steps():
        version = shared.version
        replica.gradient(at=shared.x, version=version, ready=mean.begin, finish=mean.finish)
        if gradient.is_void:
            mean.coded.settle(is_applied=True)
            replica.absent(version)
            continue
        with shared.writing():
            replica.apply(to=shared.x)
            mean.coded.settle(is_applied=not replica.skipped)
            replica.applied(shared.advance(), gradient_version=version)
        if storage is not None:
            storage.keep(mean.coded.state, version + 1)


class _CodedGradient:
    """sum_k w_k g_k / sum_k w_k, w_k: worker k's samples; separately for each bucket.

    The header travels with the last bucket.

    A codec with error feedback first gets all workers' weights, by one small all-reduce, so that its feedback keeps its weight
    in rounds in which some have no batch or a smaller one. So it starts only after backward, and so does a codec whose bits
    depend on the size of all workers' gradients (`CodedMean.fit`).

    If a worker dies meanwhile, the mean is that of the others' coded vectors. The dead worker's error feedback is lost.

    If a worker's loop uses GradScaler, a gradient of its own that is not finite makes the mean NaN on all workers, so that all
    scalers skip the step and lower their scale; the error feedback is then restored to before the step.
    """

    def __init__(
        self, replica: Replica, gradient: GradientRound, ports: Ports[ReplicatedParameters], codec: Codec
    ) -> None:
        assert ports.collectives is not None
        self._replica = replica
        self._gradient = gradient
        self._collectives = ports.collectives
        self._num_elements = ports.shared.x.numel()
        self._num_left = self._num_elements  # elements that have not been handed out
        self._waiting: list[torch.Tensor] = []  # buckets
        self._under_way: list[tuple[torch.Tensor, Mean]] = []
        # Samples, and how many workers use GradScaler: of all, once summed.
        self._known = torch.zeros(2, dtype=torch.float64)
        self._weighed: Handle | None = None
        self.coded = CodedMean(codec, ports, replica.ranges, replica.shapes)  # the buckets' means
        gradient.replacements.parts.append(self)

    def begin(self, bucket: torch.Tensor) -> None:
        """Codes a bucket (n,) and starts averaging it in place; only queues it if the codec waits for all workers."""
        self.coded.skips = self._replica.scaled
        if self.coded.tuner.wants_size:
            self.coded.keep()
        if not self.coded.waits:
            self._start(bucket, None)
            return
        if self.coded.remembers and not self._waiting:
            self._known[0], self._known[1] = self._replica.samples, float(self._replica.scaled)
            self._weighed = self._collectives.start_all_reduce(self._known)
        self._waiting.append(bucket)

    def _start(self, bucket: torch.Tensor, total: float | None) -> None:
        self._num_left -= bucket.numel()
        header, number, weight = Header(), len(self._under_way), self._replica.samples
        if bucket.numel() and not self._num_left:  # missing gradients are known by now
            header = self._gradient.header()
        mean = self.coded.start(number, bucket, weight, header.numbers, first=self._num_left, total=total)
        self._under_way.append((bucket, mean))

    def finish(self) -> None:
        """Adds up this worker's pieces of all buckets, in order, and waits for the means."""
        total = None
        if self._weighed is not None:
            self._weighed.wait()
            self._weighed = None
            total, num_scaled = self._known.tolist()
            if num_scaled:  # even a worker without a batch may have to skip the step with them
                self.coded.keep()
            self.coded.leaves_out = bool(self._replica.missing)
        if self._waiting:
            self.coded.fit(self._waiting, self._replica.samples)
            for bucket in self._waiting:
                self._start(bucket, total)
        for _, mean in self._under_way:
            mean.advance()
        totals = [mean.wait() for _, mean in self._under_way]
        if len({tuple(one.members) for one in totals}) > 1:
            raise WorkerLostError(_LOST_TWICE)
        buckets = [bucket for bucket, _ in reversed(self._under_way)]
        self._under_way.clear()
        self._num_left = self._num_elements
        heard, samples = None, None
        if self._num_elements:  # else only time is simulated
            heard, samples = self._gradient.heard_from(totals[-1].numbers), totals[0].weight
        self._gradient.end(heard, samples, lambda: torch.cat(buckets))
        self._leave_out(self._replica.missing)

    def for_newcomers(self) -> dict[str, Any]:
        return without_memories(self.coded.state())

    def enter(self, given: dict[str, Any]) -> None:
        self.coded.load(given)

    def _leave_out(self, missing: Ranges) -> None:
        """Resets what codecs have made of parameters without a gradient on any worker."""
        self.coded.leave_out(missing)
        end = self._num_elements
        for bucket in self._waiting:
            first = end - bucket.numel()
            for begin, last in within(missing, first, end):
                bucket[begin:last] = 0
            end = first
        self._waiting.clear()
