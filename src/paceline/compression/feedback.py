"""Error feedback for receivers that may drop vectors: only applied vectors change the memory."""

from __future__ import annotations

import torch

from paceline.compression.codec import Codec
from paceline.optim.ranges import Ranges


class Feedback:
    """The error feedback of one vector's sender, for a receiver that may drop what it is sent.

    Encoding is a transaction: `settle` commits it, or leaves the memory unchanged. So the applied vectors plus the memory
    always add up to the applied gradients, and a dropped gradient is in neither.

    Costs: if the codec has error feedback, two vectors, and a copy for each one that is sent.
    """

    def __init__(self, codec: Codec, num_elements: int, dtype: torch.dtype) -> None:
        # (n,), without unsettled changes; None: the codec has no error feedback.
        self.memory = codec.start(num_elements, dtype)
        self._next = None if self.memory is None else torch.empty_like(self.memory)
        self._is_open = False

    def encode(self, codec: Codec, gradient: torch.Tensor, key: int, left_out: Ranges = ()) -> torch.Tensor:
        """Codes a gradient (n,), as `Codec.encode`; discards an unsettled one.

        Elements in `left_out`, whose gradient is 0 and which the receiver does not update, keep their memory.
        """
        self._is_open = False
        if self._next is None or self.memory is None:
            encoded = codec.encode(gradient, None, key)
        else:
            self._next.copy_(self.memory)
            for begin, end in left_out:
                self._next[begin:end] = 0
            encoded = codec.encode(gradient, self._next, key)
            for begin, end in left_out:
                self._next[begin:end] = self.memory[begin:end]
        self._is_open = True
        return encoded

    def settle(self, *, is_applied: bool) -> None:
        """Commits or discards the last gradient; a second call changes nothing."""
        if self._is_open and is_applied:
            self.memory, self._next = self._next, self.memory
        self._is_open = False
