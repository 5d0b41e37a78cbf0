"""The vectors of one round: what a worker sends to each member, and what it makes of the members' messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.optim.half_types import add_up, mean_into, to_sum_type
from paceline.transport.packed_vectors import packed, unpacked
from paceline.transport.round_header import RoundHeader

_OTHER_VERSION = "sent a message of another version of Paceline"
_AT_ONCE_BYTES = 1 << 20  # up to this size, a third message takes two members longer than adding up the whole vectors


class Part(NamedTuple):
    """A vector (n,) that a round replaces: by the sum over the members or, where they have weights, by the weighted mean."""

    vector: torch.Tensor
    is_mean: bool = False


class RoundVectors:
    """A worker's vectors in a round; each member adds up a piece of every vector, and sends the sum to all.

    Args:
        parts: the vectors.
        header: of this worker's pieces; its `num_bytes` may count other vectors, too.
        members: of the round, in the order of their ids.
        worker_id: this worker.
        lost: makes the error about workers whose messages do not fit.

    Attributes:
        is_cut: whether each member adds up a piece; else each adds up everything.
        total: of the numbers in the members' headers, after `reduce`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        header: RoundHeader,
        members: Sequence[int],
        worker_id: int,
        lost: Callable[[Sequence[int], str], Exception],
    ) -> None:
        self.parts, self._header, self._members, self._worker_id, self._lost = parts, header, members, worker_id, lost
        self.is_cut = len(members) > 2 or sum(part.vector.nbytes for part in parts) > _AT_ONCE_BYTES
        self.total = 0.0

    def message_to(self, member: int) -> torch.Tensor:
        """The header, and this worker's pieces for a member, as bytes; no piece of a mean in which it has no weight."""
        parts = [part for part in self.parts if self._header.weight or not part.is_mean]
        return packed(
            [self._header.vector(), *(part.vector[self._slice_of(member, len(part.vector))] for part in parts)]
        )

    def reduce(self, messages: Mapping[int, torch.Tensor | None]) -> list[torch.Tensor]:
        """This worker's pieces of the results, from the other members' messages.

        Raises:
            WorkerLostError: they are of other rounds, or cannot be read.
        """
        me, like = self._worker_id, self._header.vector()
        headers = {one: self._header_of(one, x) for one, x in messages.items()}
        headers[me] = self._header
        for one, other in headers.items():
            if why := other.why_unlike(self._header, me):
                raise self._lost([one], why)
        self.total = sum(headers[one].number for one in self._members)
        likes = [part.vector[self._slice_of(me, len(part.vector))] for part in self.parts]
        pieces = {me: likes}
        for one, x in messages.items():
            given = zip(self.parts, likes, strict=True)
            brings = [piece if headers[one].weight or not part.is_mean else piece[:0] for part, piece in given]
            _, *pieces[one] = self._unpack(one, x, [like, *brings])
        mine = [torch.empty_like(piece) for piece in likes]
        for place, (part, out) in enumerate(zip(self.parts, mine, strict=True)):
            if part.is_mean:
                total = to_sum_type(out)
                given = [(pieces[one][place], headers[one].weight) for one in self._members]
                mean_into(total, [(piece, weight) for piece, weight in given if weight])
                out.copy_(total)
            else:
                add_up([pieces[one][place] for one in self._members], out)
        return mine

    def join(self, mine: list[torch.Tensor], messages: Mapping[int, torch.Tensor | None]) -> list[torch.Tensor]:
        """The whole results, from this worker's pieces and the other members'.

        Raises:
            WorkerLostError: these cannot be read.
        """
        results = [torch.empty_like(part.vector) for part in self.parts]
        for one in self._members:
            slices = [result[self._slice_of(one, len(result))] for result in results]
            found = mine if one == self._worker_id else self._unpack(one, messages[one], slices)
            for out, piece in zip(slices, found, strict=True):
                out.copy_(piece)
        return results

    def _slice_of(self, member: int, num_elements: int) -> slice:
        """What a member adds up of a vector."""
        place, of = (self._members.index(member), len(self._members)) if self.is_cut else (0, 1)
        return slice(num_elements * place // of, num_elements * (place + 1) // of)

    def _header_of(self, sender: int, x: torch.Tensor | None) -> RoundHeader:
        (found,) = self._unpack(sender, x, [self._header.vector()])
        try:
            return RoundHeader.of(found)
        except ValueError:
            raise self._lost([sender], _OTHER_VERSION) from None

    def _unpack(self, sender: int, x: torch.Tensor | None, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        try:
            return unpacked(x if x is not None else torch.empty(0, dtype=torch.uint8), likes)
        except RuntimeError:
            raise self._lost([sender], _OTHER_VERSION) from None
