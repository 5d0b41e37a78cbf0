"""The vectors of one round: what a worker sends to each member, and how it combines the members' messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from paceline.optim.half_types import add_up, mean_into, to_sum_type
from paceline.transport.packed_vectors import packed, room_for, unpacked
from paceline.transport.round_header import RoundHeader

_OTHER_VERSION = "sent a message of another version of Paceline"
_AT_ONCE_BYTES = 1 << 20  # up to this size, a third message takes two members longer than adding up the whole vectors


class Part(NamedTuple):
    """A vector of a round."""

    vector: torch.Tensor  # what this worker has, (n,)
    # Becomes the sum over the members or, where they have weights, the weighted mean (n,); of a gathered vector, what
    # the members have for this worker, each in the place of its id.
    result: torch.Tensor
    # "sum" or "mean"; "all-to-all" and "all-gather" as in `Collectives`.
    kind: Literal["sum", "mean", "all-to-all", "all-gather"] = "sum"

    @property
    def is_added(self) -> bool:
        return self.kind in ("sum", "mean")


@dataclass(eq=False)
class RoundVectors:
    """A worker's vectors in a round; each member adds up a piece of every vector, and sends the sum to all.

    Gathered vectors need only the members' first messages.

    Attributes:
        is_cut: whether each member adds up a piece; else each adds up everything.
        totals: of the numbers in the members' headers, after `reduce`.
        sums: this worker's pieces of the sums and means as bytes, after `reduce`.
    """

    parts: Sequence[Part]
    num_workers: int  # of the run
    header: RoundHeader  # of this worker's pieces; its `num_bytes` may count other vectors, too
    members: Sequence[int]  # of the round, in the order of their ids
    worker_id: int
    lost: Callable[[Sequence[int], str], Exception]  # makes the error about workers whose messages do not fit

    def __post_init__(self) -> None:
        added_bytes = sum(part.vector.nbytes for part in self.parts if part.is_added)
        self.is_cut = added_bytes > (_AT_ONCE_BYTES if len(self.members) <= 2 else 0)
        self.totals: list[float] = []
        self.sums = room_for([])
        self._pieces: dict[int, list[torch.Tensor]] = {}  # by member, of every part: what it has for this worker
        self._sums: dict[int, list[torch.Tensor]] = {}  # by member, of every part that is added: its sums

    def message_to(self, member: int) -> torch.Tensor:
        """The header, and this worker's pieces for a member, as bytes; no piece of a mean in which it has no weight."""
        parts = [part for part in self.parts if self.header.weight or part.kind != "mean"]
        return packed([self.header.vector(), *(part.vector[self._given_to(member, part)] for part in parts)])

    def reduce(self, messages: Mapping[int, torch.Tensor | None]) -> None:
        """Computes this worker's pieces of the sums and means, from the other members' messages, which stay in use.

        Raises:
            WorkerLostError: they are of other rounds, or cannot be read.
        """
        me, like = self.worker_id, self.header.vector()
        headers = {one: self._header_of(one, x) for one, x in messages.items()}
        headers[me] = self.header
        for one, other in headers.items():
            if why := other.why_unlike(self.header, me):
                raise self.lost([one], why)
        self.totals = [sum(said) for said in zip(*(headers[one].numbers for one in self.members), strict=True)]
        self._pieces[me] = likes = [part.vector[self._given_to(me, part)] for part in self.parts]
        for one, x in messages.items():
            given = zip(self.parts, likes, strict=True)
            brings = [piece if headers[one].weight or part.kind != "mean" else piece[:0] for part, piece in given]
            _, *self._pieces[one] = self._unpack(one, x, [like, *brings])
        added = [number for number, part in enumerate(self.parts) if part.is_added]
        self.sums = room_for([likes[number] for number in added])
        self._sums[me] = unpacked(self.sums, [likes[number] for number in added])
        for number, out in zip(added, self._sums[me], strict=True):
            if self.parts[number].kind == "mean":
                total = to_sum_type(out)
                brought = [(self._pieces[one][number], headers[one].weight) for one in self.members]
                mean_into(total, [(piece, weight) for piece, weight in brought if weight])
                out.copy_(total)
            else:
                add_up([self._pieces[one][number] for one in self.members], out)

    def take_sums(self, messages: Mapping[int, torch.Tensor | None]) -> None:
        """Takes the other members' `sums`, which stay in use; raises `WorkerLostError` if some cannot be read."""
        added = [part.vector for part in self.parts if part.is_added]
        for one, x in messages.items():
            self._sums[one] = self._unpack(one, x, [vector[self._slice_of(one, len(vector))] for vector in added])

    def write(self) -> None:
        """Gives the parts their results."""
        sums = {one: iter(pieces) for one, pieces in self._sums.items()}
        for number, part in enumerate(self.parts):
            if part.is_added:
                for one, pieces in sums.items():
                    part.result[self._slice_of(one, len(part.result))].copy_(next(pieces))
                continue
            places = part.result.chunk(self.num_workers)
            for one in self.members:
                places[one].copy_(self._pieces[one][number])

    def _given_to(self, member: int, part: Part) -> slice:
        """What of a vector a member needs."""
        if part.kind == "all-gather":
            return slice(None)
        if part.kind == "all-to-all":
            length = len(part.vector) // self.num_workers
            return slice(member * length, (member + 1) * length)
        return self._slice_of(member, len(part.vector))

    def _slice_of(self, member: int, num_elements: int) -> slice:
        """What a member adds up of a vector."""
        place, of = (self.members.index(member), len(self.members)) if self.is_cut else (0, 1)
        return slice(num_elements * place // of, num_elements * (place + 1) // of)

    def _header_of(self, sender: int, x: torch.Tensor | None) -> RoundHeader:
        (found,) = self._unpack(sender, x, [self.header.vector()])
        try:
            return RoundHeader.of(found)
        except ValueError:
            raise self.lost([sender], _OTHER_VERSION) from None

    def _unpack(self, sender: int, x: torch.Tensor | None, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        try:
            return unpacked(x if x is not None else torch.empty(0, dtype=torch.uint8), likes)
        except RuntimeError:
            raise self.lost([sender], _OTHER_VERSION) from None
