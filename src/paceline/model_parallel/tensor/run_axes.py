"""A mesh's axis over a run's own collectives: shared memory under `launch`, Gloo under torchrun."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.model_parallel.tensor.axes import Started
from paceline.ports.ports import Handle
from paceline.ports.rooted import RootedCollectives

__all__ = ["LoneCollectives", "RunAxis"]


class RunAxis:
    """Implements `Axis`. Splits long tensors, as shared memory has areas of a fixed size."""

    def __init__(self, collectives: RootedCollectives, index: int, size: int, most_bytes: int) -> None:
        self._collectives = collectives
        self.index, self.size = index, size
        self._most_bytes = most_bytes

    def all_gather(self, x: Tensor) -> Tensor:
        flat = x.contiguous().view(-1)
        gathered = flat.new_empty(self.size, len(flat))

        def start(piece: slice) -> Callable[[], None]:
            taken = flat.new_empty(self.size * (piece.stop - piece.start))
            handle = self._collectives.start_all_gather(flat[piece], taken)

            def finish() -> None:
                handle.wait()
                gathered[:, piece] = taken.view(self.size, -1)

            return finish

        _finish([start(piece) for piece in self._pieces(flat, self.size)])
        return gathered.view(self.size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        flat = x.contiguous().view(self.size, -1)
        total = flat.new_empty(flat.shape[1])

        def start(piece: slice) -> Callable[[], None]:
            given = flat[:, piece].contiguous().view(-1)
            handle = self._collectives.start_reduce_scatter(given, total[piece])
            return handle.wait

        _finish([start(piece) for piece in self._pieces(flat[0], self.size)])
        return total.view(x.shape[1:])

    def start_all_reduce(self, x: Tensor) -> Started:
        return self._start(x, self._collectives.start_all_reduce)

    def start_all_reduce_max(self, x: Tensor) -> Started:
        x.copy_(self.all_gather(x).amax(0))
        return _Changed([], x, x)

    def start_broadcast(self, x: Tensor, source: int) -> Started:
        return self._start(x, lambda piece: self._collectives.start_broadcast(piece, source))

    def start_reduce(self, x: Tensor, to: int) -> Started:
        return self._start(x, lambda piece: self._collectives.start_reduce(piece, to))

    def _start(self, x: Tensor, start: Callable[[Tensor], Handle]) -> Started:
        flat = x.contiguous().view(-1)
        return _Changed([start(flat[piece]) for piece in self._pieces(flat)], x, flat)

    def _pieces(self, flat: Tensor, times: int = 1) -> list[slice]:
        """Ranges short enough that an operation on `times` of each is within the limit."""
        step = max(1, self._most_bytes // (times * flat.itemsize))
        return [slice(first, min(first + step, len(flat))) for first in range(0, len(flat), step)]


class _Changed:
    def __init__(self, handles: list[Handle], x: Tensor, flat: Tensor) -> None:
        self._handles, self._x, self._flat = handles, x, flat

    def wait(self) -> None:
        _finish([one.wait for one in self._handles])
        if self._flat.data_ptr() != self._x.data_ptr():
            self._x.copy_(self._flat.view(self._x.shape))


def _finish(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


class LoneCollectives:
    """Implements `Collectives` for the program of a mesh without replicas."""

    def all_reduce_mean(self, vector: Tensor, weight: float, number: float = 0.0) -> float:
        """Leaves `vector` (P,) unchanged, or zero without a weight; returns the number."""
        if not weight:
            vector.zero_()
        return number

    def start_all_reduce(self, vector: Tensor) -> Handle:
        return _Done()

    def start_reduce_scatter(self, vector: Tensor, part: Tensor) -> Handle:
        part.copy_(vector)
        return _Done()

    def start_all_gather(self, part: Tensor, vector: Tensor) -> Handle:
        vector.copy_(part)
        return _Done()

    def start_all_to_all(self, given: Tensor, taken: Tensor) -> Handle:
        taken.copy_(given)
        return _Done()


class _Done:
    def wait(self) -> None:
        """Returns at once."""
