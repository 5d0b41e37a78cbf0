"""The mean of a fragment over all workers, computed in the background; uncompressed, or through a codec."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.algorithms.round_messages import Header, Heard
from paceline.compression.codec import WHAT, Codec, NoCodec
from paceline.compression.coded_mean import CodedMean, without_memories
from paceline.compression.mean import Mean
from paceline.optim.half_types import sum_type
from paceline.optim.ranges import Ranges
from paceline.ports.ports import NUM_NUMBERS, Collectives, Handle, Ports
from paceline.ports.shared import ReplicatedParameters
from paceline.system.saved_state import check_fits


class Layout(NamedTuple):
    """The layout of a fragment's vector (n,)."""

    ranges: Ranges  # of its tensors
    shapes: Sequence[tuple[int, ...]]  # of its tensors
    #: Whether it is the whole flat vector, whose first 64 bytes are no parameter's, and can carry a header.
    is_flat: bool = False


class MeanUnderWay:
    """A mean that has been started, with which headers travel."""

    def advance(self) -> None:
        """Does the work that is due half-way; either all workers call it at the same step, or none does."""

    def wait(self) -> tuple[torch.Tensor, Heard | None, Sequence[int]]:
        """The mean (n,), of half types in float32, what all workers say, and the workers whose vectors it contains.

        None: only time is simulated.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Waits for its end and discards the result."""
        self.wait()


class Means:
    """Starts the means of a method's fragments.

    Args:
        codec: compresses the vectors.
        layouts: of the fragments; none if only time is simulated.
        keeps: whether a mean under way may have to be started again, from a checkpoint or as newcomers come.
    """

    def __init__(
        self, ports: Ports[ReplicatedParameters], codec: Codec, layouts: Sequence[Layout], *, keeps: bool
    ) -> None:
        self._ports = ports
        self._layouts = layouts
        self._keeps = keeps
        self._coded: list[CodedMean] | None = None
        if not isinstance(codec, NoCodec):
            nothing = Layout((), ())
            shapes = [shape for one in layouts for shape in one.shapes]
            self._coded = [CodedMean(codec, ports, one.ranges, one.shapes, shapes) for one in layouts or [nothing]]
        self._before: dict[int, dict[str, Any]] = {}

    def start_again(self, fragment: int, vector: torch.Tensor) -> MeanUnderWay:
        """As `start`, in place of a mean that has ended and not landed."""
        if self._coded is not None:
            self._coded[fragment if vector.numel() else 0].restore(self._before[fragment])
        return self.start(fragment, vector, Header())

    def start(self, fragment: int, vector: torch.Tensor, header: Header) -> MeanUnderWay:
        """Starts the mean of `vector` (n,) over all workers; only reads `vector`."""
        ports = self._ports
        assert ports.collectives is not None
        if self._coded is None:
            is_flat = bool(self._layouts) and self._layouts[fragment].is_flat
            return _PlainMean(ports.collectives, vector, header, is_flat=is_flat)
        only_time = not vector.numel()
        coded = self._coded[0 if only_time else fragment]
        if self._keeps:
            self._before[fragment] = copy.deepcopy(coded.state())
        buffer = vector if only_time else vector.to(sum_type(vector.dtype), copy=True)
        coded.fit([buffer], 1.0)
        return _CodedMean(coded.start(fragment if only_time else 0, buffer, 1.0, header.numbers), buffer)

    def landed(self, fragment: int) -> None:
        """The mean has arrived: checkpoints take the codec's current memory from now on."""
        self._before.pop(fragment, None)

    def state(self) -> list[dict[str, Any]]:
        """The codecs' memories; of a fragment under way, that of before it was sent, as a resumed run sends it again."""
        return [self._before.get(index) or one.state() for index, one in enumerate(self._coded or ())]

    def for_newcomers(self) -> list[dict[str, Any]]:
        """The codecs' states without this worker's memories."""
        return [without_memories(one) for one in self.state()]

    def load(self, state: list[dict[str, Any]]) -> None:
        if self._coded is not None and state:
            check_fits(state, [dict] * len(self._coded), WHAT)
            for one, kept in zip(self._coded, state, strict=True):
                one.load(kept)


class _PlainMean(MeanUnderWay):
    """The mean of an uncompressed vector.

    Args:
        collectives: adds up the vectors.
        vector: (n,), which is copied.
        is_flat: whether the header's numbers replace the first elements; otherwise they precede these.
    """

    def __init__(self, collectives: Collectives, vector: torch.Tensor, header: Header, *, is_flat: bool) -> None:
        self._is_flat = is_flat
        self._only_time = not vector.numel()  # then no header travels
        self._buffer = vector
        if not self._only_time:
            wide = sum_type(vector.dtype)
            numbers = vector.new_tensor(header.numbers, dtype=wide)
            self._buffer = torch.cat([numbers, vector[NUM_NUMBERS if is_flat else 0 :].to(wide)])
        self._handle: Handle = collectives.start_all_reduce(self._buffer)

    def end(self) -> None:
        self._handle.wait()

    def wait(self) -> tuple[torch.Tensor, Heard | None, Sequence[int]]:
        members = self._handle.wait()
        if self._only_time:
            return self._buffer, None, members
        heard = Heard.of(self._buffer[:NUM_NUMBERS].tolist(), len(members))
        if self._is_flat:
            self._buffer[:NUM_NUMBERS] = 0.0
        return self._buffer[0 if self._is_flat else NUM_NUMBERS :].div_(len(members)), heard, members


class _CodedMean(MeanUnderWay):
    """The mean of a coded vector, which it overwrites."""

    def __init__(self, mean: Mean, buffer: torch.Tensor) -> None:
        self._mean, self._buffer = mean, buffer

    def advance(self) -> None:
        self._mean.advance()

    def wait(self) -> tuple[torch.Tensor, Heard | None, Sequence[int]]:
        totals = self._mean.wait()
        heard = Heard.of(totals.numbers, len(totals.members)) if self._buffer.numel() else None
        return self._buffer, heard, totals.members
