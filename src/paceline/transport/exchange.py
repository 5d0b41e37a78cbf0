"""Vectors that travel together: every member adds up a piece of each, and sends the sums to all; or gathers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.transport.packed_vectors import packed
from paceline.transport.round_vectors import RoundVectors

Messages = Mapping[tuple[int, int, str, int], torch.Tensor | None]
"""What has come, by number, view, kind and sender."""


class Kinds(NamedTuple):
    """Of an exchange's messages."""

    pieces: str
    means: str


class Exchange:
    """The messages with which the members of a view add up vectors.

    Args:
        vectors: this worker's.
        kinds: of the messages.
        number: of the messages, by which a kind's exchanges differ.
        view: of the members.
        others: the other members.
        say: sends a message of a kind to a member.
        received: what has come; new messages are added to it.

    Attributes:
        results: of the vectors; empty until all messages have come.
    """

    def __init__(
        self,
        vectors: RoundVectors,
        kinds: Kinds,
        number: int,
        view: int,
        others: Sequence[int],
        say: Callable[[str, int, int, torch.Tensor | None], None],
        received: Messages,
    ) -> None:
        self.vectors, self.number, self.view = vectors, number, view
        self._kinds, self._others, self._say, self._received = kinds, others, say, received
        self._mine: list[torch.Tensor] = []
        self.results: list[torch.Tensor] = []
        self._is_reduced = self._is_over = False
        for other in others:
            say(kinds.pieces, number, other, vectors.message_to(other))

    def advance(self) -> bool:
        """Goes on with what has come; returns whether the results are complete.

        Raises:
            WorkerLostError: a message does not fit.
        """
        if not self._is_reduced and (messages := self._all(self._kinds.pieces)) is not None:
            self._mine, self._is_reduced = self.vectors.reduce(messages), True
            if self.vectors.is_cut:
                for other in self._others:
                    self._say(self._kinds.means, self.number, other, packed(self.vectors.added(self._mine)))
            else:
                self.results, self._is_over = self._mine, True
        if self._is_reduced and not self._is_over and (messages := self._all(self._kinds.means)) is not None:
            self.results, self._is_over = self.vectors.join(self._mine, messages), True
        return self._is_over

    def _all(self, kind: str) -> dict[int, torch.Tensor | None] | None:
        """The messages of a kind from all others; None: some have not come."""
        keys = {one: (self.number, self.view, kind, one) for one in self._others}
        if not all(key in self._received for key in keys.values()):
            return None
        return {one: self._received[key] for one, key in keys.items()}
