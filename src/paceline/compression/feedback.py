"""A sender's memory of what its codec has kept back, which only what the receiver has applied may change."""

from __future__ import annotations

import torch

from paceline.compression.codec import Codec, Encoded
from paceline.vectors.flat import Ranges

__all__ = ["Feedback"]


class Feedback:
    """The memory of one vector's sender, for a receiver that may drop what it is sent.

    Encoding is a transaction: `settle` makes it count, or leaves the memory as it was before. So what was applied, and the
    memory, always add up to the gradients that were applied, and a dropped gradient is in neither.

    Costs: where the codec remembers, two vectors, and a copy for each one that is sent.

    Attributes:
        memory: (n,), without what is not settled yet; None: the codec remembers nothing.
    """

    def __init__(self, codec: Codec, num_elements: int, dtype: torch.dtype) -> None:
        self.memory = codec.start(num_elements, dtype)
        self._next = None if self.memory is None else torch.empty_like(self.memory)
        self._is_open = False

    def encode(self, codec: Codec, gradient: torch.Tensor, key: int, left_out: Ranges = ()) -> Encoded:
        """Codes a gradient (n,), as of `Codec.encode`; what was not settled is forgotten.

        The memory of elements that are `left_out`, whose gradient is 0 and which the receiver does not update, stays.
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
        """The last gradient has been applied, or dropped; to say so twice changes nothing."""
        if self._is_open and is_applied:
            self.memory, self._next = self._next, self.memory
        self._is_open = False
