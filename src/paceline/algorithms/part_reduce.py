"""Sharded updates: part-reduce of each worker's own strips, the owner's update, part-broadcast."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from paceline.algorithms.gradient_round import GradientRound
from paceline.optim.half_types import sum_type, to_sum_type
from paceline.ports.ports import Collectives, Handle, Ports
from paceline.ports.replica import Piece, Replica
from paceline.ports.shared import ReplicatedParameters

_ALIGNMENT_ELEMENTS = 16  # 64 bytes of float32


@dataclass
class _Bucket:
    """One bucket of the gradient, cut into one strip per worker."""

    first: int  # where it begins in the flat vector (P,)
    length: int
    strip: int  # elements of a strip; all strips but the last ones are full
    at: int  # where this worker's strip lies among all of its own
    padded: torch.Tensor  # (num_workers * strip,), of gradients; float32 for half types
    g: torch.Tensor  # (strip,), this worker's strip of the mean
    x: torch.Tensor  # (num_workers * strip,), of new parameters, in the same memory if of the same type
    handle: Handle | None = None


@dataclass
class PartReduce:
    """sum_k (w_k / u) g_k / sum_k (w_k / u) of this worker's strips, w_k: worker k's samples, u: a unit that all know.

    Every bucket of the gradient is cut into one strip per worker, as every layer is in the paper, so that its part-reduce
    starts while backward computes earlier layers. With one range of the whole vector per worker, all would wait for the owner
    of a few layers. Strips are exact ranges of elements; they may cut parameters anywhere.
    """

    replica: Replica
    ports: Ports[ReplicatedParameters]
    collectives: Collectives
    gradient: GradientRound
    _buckets: list[_Bucket] = field(default_factory=list)
    _num_begun: int = 0
    _has_mean: bool = False  # of a step that has not been made
    _x: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    _g: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    _pieces: list[Piece] = field(default_factory=list)

    def begin(self, bucket: torch.Tensor) -> None:
        """Starts the part-reduce of a bucket (m,), which keeps its values."""
        if self._has_mean:
            self._meet(steps=False)
        factor = self.replica.samples / self.gradient.unit
        if self._num_begun == len(self._buckets):
            self._buckets.append(self._cut(bucket))
        own = self._buckets[self._num_begun]
        self._num_begun += 1
        torch.mul(to_sum_type(bucket), factor, out=own.padded[: own.length])
        self.ports.moved(2, of=bucket)
        own.handle = self.collectives.start_reduce_scatter(own.padded, own.g)

    def finish(self) -> None:
        # Missing gradients are known only now.
        numbers = torch.tensor(self.gradient.header(self.replica.samples).numbers, dtype=torch.float64)
        self.collectives.start_all_reduce(numbers).wait()
        heard = self.gradient.heard_from(numbers.tolist())
        total = heard.samples / self.gradient.unit
        for bucket in self._buckets:
            assert bucket.handle is not None
            bucket.handle.wait()
        if not self._pieces:
            self._lay_out()
        self.ports.moved(4 / self.ports.num_workers)  # divided and gathered
        self._num_begun = 0
        for bucket in self._buckets:
            self._g[bucket.at : bucket.at + bucket.strip] = bucket.g.div_(total) if total else bucket.g
        self.gradient.end(heard, heard.samples or None)
        self._has_mean = True

    def _meet(self, *, steps: bool) -> None:
        """After a mean, either all step next, or all make another backward pass."""
        self.gradient.round.meet(steps=steps)
        self._has_mean = False

    def update(self, x: torch.Tensor) -> None:
        """Steps on this worker's strips of `x` (P,), which is only read, and starts the part-broadcasts."""
        self._meet(steps=True)
        for first, length, at in self._pieces:
            self._x[at : at + length] = x[first : first + length]
        self.ports.moved(2 / self.ports.num_workers)
        self.replica.apply_pieces(to=self._x, g=self._g, pieces=self._pieces)
        for bucket in reversed(self._buckets):  # the first layers first: the next forward pass starts there
            part = self._x[bucket.at : bucket.at + bucket.strip]
            bucket.handle = self.collectives.start_all_gather(part, bucket.x)
        for bucket in reversed(self._buckets):
            assert bucket.handle is not None
            bucket.handle.wait()

    def copy_to(self, x: torch.Tensor) -> None:
        """Copies the strips of all workers to `x` (P,)."""
        for bucket in self._buckets:
            x[bucket.first : bucket.first + bucket.length] = bucket.x[: bucket.length]
        self.ports.moved(2)

    def _cut(self, bucket: torch.Tensor) -> _Bucket:
        length, last = bucket.numel(), self._buckets[-1] if self._buckets else None
        strip = math.ceil(length / self.ports.num_workers / _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS
        wide = sum_type(bucket.dtype)
        padded = bucket.new_zeros(self.ports.num_workers * strip, dtype=wide)
        return _Bucket(
            first=(last.first if last else self.ports.shared.x.numel()) - length,
            length=length,
            strip=strip,
            at=last.at + last.strip if last else 0,
            padded=padded,
            g=bucket.new_zeros(strip, dtype=wide),
            x=padded if bucket.dtype == wide else bucket.new_zeros(len(padded)),
        )

    def _lay_out(self) -> None:
        size = sum(bucket.strip for bucket in self._buckets)
        self._x, self._g = (self._buckets[0].x.new_zeros(size) for _ in range(2))
        for bucket in self._buckets:
            begin = min(self.ports.worker_id * bucket.strip, bucket.length)
            end = min(begin + bucket.strip, bucket.length)
            self._pieces.append(Piece(bucket.first + begin, end - begin, bucket.at))
