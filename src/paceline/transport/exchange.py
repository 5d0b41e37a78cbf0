"""Vectors that travel together: every member adds up a piece of each, and sends the sums to all; or gathers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.transport.round_vectors import RoundVectors

Messages = Mapping[tuple[int, int, str, int], torch.Tensor | None]
"""What has come, by number, view, kind and sender."""


class Kinds(NamedTuple):
    """Of an exchange's messages."""

    pieces: str
    means: str


@dataclass(eq=False)
class Exchange:
    """The messages with which the members of a view add up vectors."""

    vectors: RoundVectors
    kinds: Kinds
    number: int  # of the messages, by which a kind's exchanges differ
    view: int
    others: Sequence[int]  # the other members
    say: Callable[[str, int, int, torch.Tensor | None], None]  # sends a message of a kind to a member
    received: Messages  # new messages are added to it

    def __post_init__(self) -> None:
        self._is_reduced = self._is_over = False
        for other in self.others:
            self.say(self.kinds.pieces, self.number, other, self.vectors.message_to(other))

    def advance(self) -> bool:
        """Processes messages; returns whether all have come. Raises `WorkerLostError` for a wrong message."""
        if not self._is_reduced and (messages := self._all(self.kinds.pieces)) is not None:
            self.vectors.reduce(messages)
            self._is_reduced, self._is_over = True, not self.vectors.is_cut
            for other in self.others if self.vectors.is_cut else ():
                self.say(self.kinds.means, self.number, other, self.vectors.sums)
        if self._is_reduced and not self._is_over and (messages := self._all(self.kinds.means)) is not None:
            self.vectors.take_sums(messages)
            self._is_over = True
        return self._is_over

    def _all(self, kind: str) -> dict[int, torch.Tensor | None] | None:
        """The messages of a kind from all others; None: some have not come."""
        keys = {one: (self.number, self.view, kind, one) for one in self.others}
        if not all(key in self.received for key in keys.values()):
            return None
        return {one: self.received[key] for one, key in keys.items()}
