"""Shared state of all coded means of a worker: the codec and its tuner, the worker's collectives, counts and warnings."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from paceline.compression.codec import Codec, Moves, Tuner
from paceline.compression.measured import measured_moves
from paceline.errors import NotFiniteWarning
from paceline.optim.half_types import is_finite
from paceline.optim.ranges import Ranges
from paceline.ports.ports import Collectives, Ports


class Coding:
    """The base of `CodedMean`; its vectors refer to it.

    Args:
        codec: of an all-to-all's kinds, or `Power`.
        ranges: of the parameters in the flat vector (P,); gaps between them stay 0. None: there are no gaps.
        shapes: of the parameters, for `Power`.
        model_shapes: of all parameters of the model, if these are only some of them.
    """

    def __init__(
        self,
        codec: Codec,
        ports: Ports[Any],
        ranges: Ranges | None = None,
        shapes: Sequence[tuple[int, ...]] = (),
        model_shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        assert ports.collectives is not None
        self.codec = codec
        self.collectives: Collectives = ports.collectives
        self.worker_id, self.num_workers = ports.worker_id, ports.num_workers
        self.counts, self.moved, self.clock = ports.counts, ports.moved, ports.clock
        self.ranges, self.shapes = ranges, shapes
        self.model_shapes = shapes if model_shapes is None else model_shapes
        self.seed = ports.random.getrandbits(63)
        self.tuner: Tuner = codec.tuner()
        self._measured = measured_moves(codec, ports)
        self.fingerprint = zlib.crc32(repr(codec).encode())
        self.sizes: dict[int, float] = {}  # of the means since the tuner was last told
        self.skips = False  # whether a step whose mean is not finite is left out, by all workers
        self._has_warned = self._has_said_lost = False
        self.slots: dict[int, Any] = {}  # by number, what makes the means of a vector
        self.kept: dict[int, dict[str, Any]] = {}  # of a checkpoint, for vectors that have not come yet

    def usable_weight(self, vector: Tensor, weight: float) -> float:
        """The weight with which a vector takes part in the mean; NaN: no vector does."""
        return self.weight_left_out() if weight and vector.numel() and not is_finite(vector) else weight

    def weight_left_out(self) -> float:
        """The weight of a vector that is not finite; warns once if only this vector is left out of the mean."""
        if self.skips:
            return math.nan
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A gradient of worker {self.worker_id} is not finite and is left out of the mean; its codec's memory "
                "stays unchanged. If it happens again, lower the learning rate or clip gradients. This warning "
                "appears once.",
                NotFiniteWarning,
                stacklevel=2,
            )
        return 0.0

    def does_not_fit(self) -> None:
        """Warns that the checkpoint's memories do not match the present vectors."""
        if not self._has_said_lost:
            self._has_said_lost = True
            warnings.warn(
                "The checkpoint was written with another number of workers, or with other buckets or fragments: the "
                "codec's error-feedback memory is ignored.",
                stacklevel=2,
            )

    def finished(self, number: int, size: float) -> None:
        """A mean is in place; `size` is that of the vectors rounded for it."""
        if self.tuner.wants_size and not self.tuner.asks_first:
            self.sizes[number] = size

    def moves_of(self, codec: Codec) -> Moves:
        """The cost of encoding and decoding by the present step's `codec`."""
        return self._measured or codec.moves

    @contextmanager
    def coding(self, vectors: float, of: Tensor) -> Iterator[None]:
        """Counts the seconds of coding; in virtual time, those of reading and writing `vectors` vectors."""
        begun_s = self.clock.now_s()
        self.moved(vectors, of=of)
        yield
        self.counts.codec_s += self.clock.now_s() - begun_s

    def count(self, num_elements: int, num_bytes: int) -> None:
        self.counts.coded_elements += num_elements
        self.counts.coded_bytes += num_bytes
