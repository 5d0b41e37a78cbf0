"""Exchanges of whole tensors among the workers along one axis of a layout or a mesh, over any carrier."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.ports.ports import NO_NUMBERS, Handle
from paceline.ports.rooted import RootedCollectives
from paceline.ports.started import CarriedOutTogether


class Axis:
    """The workers that differ only in one coordinate."""

    def __init__(
        self,
        collectives: RootedCollectives | None = None,  # None: there is one worker, or the workers are not connected yet
        size: int = 1,
        index: int = 0,  # this worker's position among them
        # Of one operation; longer ones are split, as shared memory has areas of a fixed size.
        most_bytes: int = sys.maxsize,
    ) -> None:
        self._collectives = collectives or LoneCollectives()
        self.size, self.index = size, index
        self._most_bytes = most_bytes

    def all_gather(self, x: Tensor) -> Tensor:
        """All workers' `x`, (size, *x.shape)."""
        return self._exchange(x[None], self.size, self._collectives.start_all_gather)

    def reduce_scatter(self, pieces: Tensor) -> Tensor:
        """This worker's piece of `pieces` (size, ...), summed over all workers."""
        return self._exchange(pieces, 1, self._collectives.start_reduce_scatter)[0]

    def all_to_all(self, pieces: Tensor) -> Tensor:
        """Piece k of `pieces` (size, ...) goes to worker k; returns the pieces for this worker, in worker order."""
        return self._exchange(pieces, self.size, self._collectives.start_all_to_all)

    def start_all_reduce(self, x: Tensor) -> Handle:
        return self._start(x, self._collectives.start_all_reduce)

    def start_broadcast(self, x: Tensor, source: int) -> Handle:
        return self._start(x, lambda piece: self._collectives.start_broadcast(piece, source))

    def start_reduce(self, x: Tensor, to: int) -> Handle:
        """Begins replacing `x` by the sum on worker `to`; on others it is then undefined."""
        return self._start(x, lambda piece: self._collectives.start_reduce(piece, to))

    def _exchange(self, pieces: Tensor, rows: int, start: Callable[[Tensor, Tensor], Handle]) -> Tensor:
        """(n, ...) -> (rows, ...)."""
        flat = pieces.contiguous().view(len(pieces), -1)
        out = flat.new_empty(rows, flat.shape[1])
        started: list[tuple[Handle, Tensor, Tensor]] = []
        for columns in self._ranges(flat.shape[1], self.size * flat.itemsize):
            target = out[:, columns]
            taken = target.contiguous()  # the same memory unless `target` has gaps
            started.append((start(flat[:, columns].contiguous().view(-1), taken.view(-1)), taken, target))
        for handle, taken, target in started:
            handle.wait()
            if taken.data_ptr() != target.data_ptr():
                target.copy_(taken)
        return out.view(rows, *pieces.shape[1:])

    def _start(self, x: Tensor, start: Callable[[Tensor], Handle]) -> Handle:
        flat = x.contiguous().view(-1)
        return _Started([start(flat[piece]) for piece in self._ranges(len(flat), flat.itemsize)], x, flat)

    def _ranges(self, length: int, element_bytes: int) -> list[slice]:
        step = max(1, self._most_bytes // element_bytes)
        return [slice(first, min(first + step, length)) for first in range(0, length, step)]


class _Started:
    def __init__(self, handles: list[Handle], x: Tensor, flat: Tensor) -> None:
        self._handles, self._x, self._flat = handles, x, flat

    def wait(self) -> Sequence[int]:
        members = [handle.wait() for handle in self._handles]
        if self._flat.data_ptr() != self._x.data_ptr():
            self._x.copy_(self._flat.view(self._x.shape))
        return members[-1] if members else ()


def side_by_side(pieces: Tensor) -> Tensor:
    """(m, rows, features / m), as workers' pieces come -> (rows, features)."""
    return pieces.transpose(0, 1).flatten(1)


def exchanged(x: Tensor, forward: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]) -> Tensor:
    """`forward(x)`; the backward pass applies `transpose` to its gradient."""
    return _Exchange.apply(x, forward, transpose)  # type: ignore[return-value]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], transpose: Any) -> Tensor:
        ctx.transpose = transpose
        y = forward(x)
        # Autograd forbids in-place changes, such as nn.ReLU(inplace=True)'s, of views that a function returns.
        return y.clone() if y._base is not None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.transpose(gradients[0]), None, None


class LoneCollectives(CarriedOutTogether):
    """Implements `RootedCollectives` for one worker."""

    members = (0,)

    def all_reduce_mean(self, vector: Tensor, weight: float, numbers: Sequence[float] = NO_NUMBERS) -> list[float]:
        """Leaves `vector` (P,) unchanged, or zero without a weight; returns the numbers."""
        if not weight:
            vector.zero_()
        return list(numbers)
