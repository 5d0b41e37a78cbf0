"""How a whole model's flat vector maps to the vectors of workers that each hold a part of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

REPLICAS = "replicas"  # the axis of the workers with the same part of the model
#: Elements that one operation along any other axis may have, in addition to the number of a worker's parameters.
EXCHANGED_ELEMENTS = 1 << 16


class AxisShape(NamedTuple):
    """Workers that differ in one coordinate only, where the numbers of neighbours along it are `stride` apart.

    >>> AxisShape(size=2, stride=3).members(4), AxisShape(size=2, stride=3).place(4)
    (range(1, 7, 3), 1)
    """

    size: int
    stride: int = 1

    def place(self, worker: int) -> int:
        """A worker's coordinate."""
        return worker // self.stride % self.size

    def members(self, worker: int) -> range:
        """The workers that differ from it at most in this coordinate."""
        first = worker - self.place(worker) * self.stride
        return range(first, first + self.size * self.stride, self.stride)

    def lists(self, num_workers: int) -> list[range]:
        """All groups of workers along the axis, in the order of their first workers."""
        return [self.members(worker) for worker in range(num_workers) if not self.place(worker)]


@dataclass(frozen=True)
class Shard:
    """One parameter: its place in the whole vector (W,), and the place of a worker's part, or of all of it."""

    whole_at: int  # its first element in the whole vector
    at: int  # the first element in a worker's vector
    shape: tuple[int, ...]  # of the whole parameter
    #: (dimension, axis): the dimension is cut into equal parts along that axis. Empty: every worker has all of it.
    cuts: tuple[tuple[int, AxisShape], ...] = ()
    owner: int | None = None  # the only part that has it, as a placed model's; None: all have it, or a piece of it

    def part(self, whole: torch.Tensor, place: int) -> torch.Tensor:
        """A view of the part of the whole parameter that the worker at `place`, among those with one model, holds."""
        for dim, axis in self.cuts:
            whole = whole.chunk(axis.size, dim)[axis.place(place)]
        return whole


@dataclass(frozen=True)
class Sharding:
    """The mapping between a vector (W,) of all parameters and `parts` vectors (P,) of one part each."""

    parts: int  # workers that together hold one whole model
    num_whole: int  # W, of the whole vector, padding included
    num_local: int  # P, of a worker's; the longest one's if their lengths differ
    #: The first element of a worker's vector that belongs to a shard; earlier elements are equal on all workers.
    first_cut: int
    shards: tuple[Shard, ...]  # of each parameter
    #: Along which the workers of one model exchange activations, by name.
    axes: Mapping[str, AxisShape] = field(default_factory=dict[str, AxisShape])
    lengths: tuple[int, ...] = ()  # P of each part, if they differ; the workers of one model then exchange messages

    @property
    def sizes(self) -> tuple[int, ...]:
        """P of each part."""
        return self.lengths or (self.num_local,) * self.parts

    @property
    def digest(self) -> str:
        """Differs between mappings, whose parts' vectors must not be mistaken for each other."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def cut(self, whole: torch.Tensor, part: int, out: torch.Tensor) -> None:
        """Copies the elements of `whole` (W,) that `part` holds into `out` (P,)."""
        out.zero_()
        for shard in self.shards:
            if shard.owner in (None, part):
                view = shard.part(self._whole(whole, shard), part)
                self._local(out, shard, view.shape).copy_(view)

    def assemble(self, locals_: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Copies the vectors (P,) of all parts, in their order, into the whole `out` (W,)."""
        out.zero_()
        for shard in self.shards:
            view = self._whole(out, shard)
            # Where several parts have the same elements, the first one's count.
            for part in reversed(range(self.parts)) if shard.cuts else [shard.owner or 0]:
                piece = shard.part(view, part)
                piece.copy_(self._local(locals_[part], shard, piece.shape))

    def whole_of(self, locals_: torch.Tensor) -> torch.Tensor:
        """Joins the vectors of all parts, in a row (sum of their lengths,), into the whole vector (W,)."""
        whole = locals_.new_empty(self.num_whole)
        self.assemble(locals_.split(self.sizes), whole)
        return whole

    def _whole(self, whole: torch.Tensor, shard: Shard) -> torch.Tensor:
        numel = torch.Size(shard.shape).numel()
        flat = whole[shard.whole_at : shard.whole_at + numel]
        return flat.view(shard.shape) if shard.cuts else flat

    def _local(self, local: torch.Tensor, shard: Shard, shape: torch.Size) -> torch.Tensor:
        return local[shard.at : shard.at + shape.numel()].view(shape)
