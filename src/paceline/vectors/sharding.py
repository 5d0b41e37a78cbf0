"""A whole model's flat vector, and the vectors of workers that hold a part of it each: which element lies where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Shard", "Sharding"]


@dataclass(frozen=True)
class Shard:
    """One parameter: where it lies in the whole vector (W,), and where a worker has its part, or all of it.

    Args:
        whole_at: its first element in the whole vector.
        at: the first element in a worker's vector.
        shape: of the whole parameter.
        dim: the dimension that is cut into equal parts; None: every worker has all of it.
    """

    whole_at: int
    at: int
    shape: tuple[int, ...]
    dim: int | None = None


@dataclass(frozen=True)
class Sharding:
    """How a vector (W,) of all parameters, and `parts` vectors (P,) of one part each, belong together.

    Args:
        parts: workers that have one whole model between them.
        num_whole: W, of the whole vector, padding included.
        num_local: P, of a worker's.
        first_cut: the first element of a worker's vector from which on it has shards of its own; before it, all are alike.
        shards: of each parameter.
    """

    parts: int
    num_whole: int
    num_local: int
    first_cut: int
    shards: tuple[Shard, ...]

    def cut(self, whole: torch.Tensor, part: int, out: torch.Tensor) -> None:
        """Copies what `part` holds of `whole` (W,) into `out` (P,)."""
        out.zero_()
        for shard in self.shards:
            view = self._whole(whole, shard)
            self._local(out, shard).copy_(view if shard.dim is None else view.chunk(self.parts, shard.dim)[part])

    def assemble(self, locals_: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Copies the vectors (P,) of all parts, in their order, into the whole `out` (W,)."""
        out.zero_()
        for shard in self.shards:
            view = self._whole(out, shard)
            if shard.dim is None:
                view.copy_(self._local(locals_[0], shard))
                continue
            for piece, local in zip(view.chunk(self.parts, shard.dim), locals_, strict=True):
                piece.copy_(self._local(local, shard))

    def _whole(self, whole: torch.Tensor, shard: Shard) -> torch.Tensor:
        numel = torch.Size(shard.shape).numel()
        flat = whole[shard.whole_at : shard.whole_at + numel]
        return flat if shard.dim is None else flat.view(shard.shape)

    def _local(self, local: torch.Tensor, shard: Shard) -> torch.Tensor:
        shape = list(shard.shape)
        if shard.dim is not None:
            shape[shard.dim] //= self.parts
        numel = torch.Size(shape).numel()
        flat = local[shard.at : shard.at + numel]
        return flat if shard.dim is None else flat.view(shape)
