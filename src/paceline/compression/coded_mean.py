"""The weighted mean of all workers' vectors, through a codec: started, and finished later, like any collective.

Each worker codes the pieces of its vector and sends piece k to worker k (all-to-all). That worker decodes and adds up the
pieces in float32 and re-encodes the mean; then all collect all pieces (all-gather). Every worker decodes the same bytes,
including its own piece's, so the means are equal, bit for bit. The program starts both operations in its own order, never when
another one ends: workers would start them in different orders.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.compression.codec import WHAT
from paceline.compression.coding import Coding
from paceline.compression.low_rank_mean import LowRankMean
from paceline.compression.mean import Mean
from paceline.compression.pieces import Pieces, piece_of
from paceline.compression.power import Power
from paceline.errors import AlgorithmWarning, UsageError
from paceline.optim.half_types import is_finite
from paceline.optim.ranges import Ranges
from paceline.ports.ports import NO_NUMBERS
from paceline.system.saved_state import check_fits


class CodedMean(Coding):
    """Averages vectors over all workers through a codec; all workers make the same calls in the same order.

    A vector has a number, such as that of its bucket or fragment, which identifies its memory; its length must not change.
    With one worker, nothing is coded. A worker of weight 0, or whose vector is not finite, sends nothing and keeps its memory;
    if no vector is finite, the mean is NaN. With `skips`, one vector that is not finite makes the mean NaN on all workers.

    The means of one step can form a transaction: `keep` begins it, and `settle` ends it. If the step is not applied, all state
    (memories, factors, counts, the tuner's) is restored to the beginning.

    Costs: about 2 (n - 1) / n of a coded vector sent by each of n workers; memory as the codec says, and buffers of two
        vectors.
    """

    leaves_out = False  # whether `leave_out` may follow
    _before: dict[str, Any] | None = None  # the state at the beginning of a transaction

    def start(
        self,
        number: int,  # the vector's
        vector: Tensor,  # what this worker has
        weight: float,  # 0: nothing
        numbers: Sequence[float] = NO_NUMBERS,  # (4), to add up over all workers; whole ones exactly, up to 2^24
        first: int = 0,  # where in the flat vector (P,) this one begins
        # Of all workers' weights, if known: the error feedback is then rescaled to count as much as in the mean that it
        # is left over from, even if weights have changed. None: no rescaling.
        total: float | None = None,
    ) -> Mean:
        """Begins replacing `vector` (n,) by the mean, weighted by `weight`; it is not touched before `wait`."""
        if number in self.sizes:
            self.tuner.tell(sum(self.sizes.values()))
            self.sizes.clear()
        slot = self.slots.get(number)
        if slot is None:
            if vector.device.type != "cpu":
                raise UsageError("Codecs need the model on the CPU, but this one is on a GPU: leave out codec.")
            make = LowRankMean if isinstance(self.codec, Power) and self.num_workers > 1 else Pieces
            slot = self.slots[number] = make(self, number, vector, first)
            slot.load(self.kept.pop(number, None))
        if weight and total and vector.numel() and is_finite(vector):
            slot.shares(weight / total)
        if self.leaves_out:
            slot.note()
        return slot.start(vector, weight, numbers)

    def leave_out(self, ranges: Ranges) -> None:
        """Restores the memory of elements of the flat vector (P,) that no worker applies, as before the last means."""
        for slot in self.slots.values() if self.leaves_out else ():
            slot.leave_out(ranges)

    def fit(self, vectors: Sequence[Tensor], weight: float) -> None:
        """Chooses the codec for the vectors, numbered from 0, that are started next, all with this weight.

        Costs: nothing; if the tuner asks for all workers' sizes first, one all-reduce of three numbers per vector, which waits
            for all workers.

        Let worker k's vector be of size m_k, and w_k its share. Then the mean's first error is of the size sum w_k^2 m_k. The
        mean is rounded once more; its scales are at most the means of the workers', so its size is at most
        (sum w_k sqrt(m_k))^2.
        """
        if not self.tuner.asks_first or self.num_workers == 1:
            return
        told = torch.zeros(3, len(vectors), dtype=torch.float64)
        pieces = [piece_of(vector.numel(), self.num_workers) for vector in vectors]
        for number, (vector, piece) in enumerate(zip(vectors, pieces, strict=True)):
            if weight and piece:
                with self.coding(0.0, vector):
                    size = sum(self.tuner.size_of(part) for part in vector.split(piece))
                if math.isfinite(size):
                    told[:, number] = torch.tensor([weight, weight**2 * size, weight * math.sqrt(size)])
        self.collectives.start_all_reduce(told.view(-1)).wait()
        size = mean_size = 0.0
        for weights, squares, roots in zip(*told.tolist(), strict=True):
            if weights:
                size += squares / weights**2
                mean_size += (roots / weights) ** 2
        if any(pieces) and (caution := self.tuner.fit(size, mean_size, max(pieces))) and not self.worker_id:
            warnings.warn(caution, AlgorithmWarning, stacklevel=2)

    @property
    def remembers(self) -> bool:
        """Whether anything is kept for later means."""
        return isinstance(self.codec, Power) or self.codec.remembers

    @property
    def waits(self) -> bool:
        """Whether all workers must be known, by `total` or `fit`, before anything is coded."""
        return self.remembers or self.tuner.asks_first

    def keep(self) -> None:
        """Begins a transaction, if none is under way; costs a copy of the state."""
        if self._before is None:
            self._before = copy.deepcopy(self.state())

    def settle(self, *, is_applied: bool) -> None:
        """Ends the transaction; restores the state of `keep` unless its means have been applied."""
        if self._before is not None and not is_applied:
            self.restore(self._before)
        self._before = None

    def restore(self, state: dict[str, Any]) -> None:
        self.slots.clear()
        self.load(state)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint: memories, counts, and the tuner's state."""
        slots = {number: slot.state() for number, slot in self.slots.items()}
        return {
            "codec": self.fingerprint,
            "worker": self.worker_id,
            "slots": {**self.kept, **slots},
            "tuner": self.tuner.state(),
            "sizes": dict(self.sizes),
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Restores a state; starts without one if it is None or another codec's."""
        if state is None or state.get("codec") != self.fingerprint:
            if state is not None:
                warnings.warn(
                    "The checkpoint was written with another codec: its error-feedback memory is ignored.",
                    stacklevel=2,
                )
            return
        like = {"codec": int, "worker": int, "slots": dict, "tuner": self.tuner.state(), "sizes": dict}
        check_fits(state, like, WHAT)
        check_fits(state["sizes"], dict.fromkeys(state["sizes"], float), WHAT)
        check_fits(state["slots"], dict.fromkeys(state["slots"], dict), WHAT)
        if state["worker"] != self.worker_id:  # of which this worker takes the place
            state = without_memories(state)
        self.kept, self.sizes = dict(state["slots"]), dict(state["sizes"])
        if state["tuner"]:
            self.tuner.load(state["tuner"])


def without_memories(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a state that is equal on all workers."""
    slots = {
        number: {name: slot[name] for name in ("count", "rights") if name in slot}
        for number, slot in state["slots"].items()
    }
    return state | {"slots": slots}
