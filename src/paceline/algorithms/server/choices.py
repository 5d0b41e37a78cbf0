"""Shard 0 tells the other shards which workers' gradients make a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from paceline.errors import PeerLostError
from paceline.ports.ports import Mailbox, Message, Ports
from paceline.ports.shared import SharedParameters


class Choices:
    """Sends followers each choice, and the last one again to those that return. Costs a message per step and follower.

    A follower is never two steps behind, as its workers wait for all shards, so it can miss the last choice only.
    """

    def __init__(self, ports: Ports[SharedParameters], *, are_made: bool) -> None:
        self._followers = (
            set(range(ports.num_workers + 1, ports.num_workers + ports.num_servers)) if are_made else set()
        )
        self._last: Message | None = None

    def make(self, step: int, workers: Iterable[int]) -> None:
        """These workers' gradients make a step; `tell` follows."""
        if self._followers:
            self._last = Message("choice", step, x=torch.tensor([*workers], dtype=torch.int64))

    def tell(self, mailbox: Mailbox, followers: Iterable[int] | None = None) -> None:
        """Sends these followers, or all, the last choice; those that have left get it when they return."""
        if self._last is not None:
            for follower in self._followers if followers is None else self._followers.intersection(followers):
                with contextlib.suppress(PeerLostError):
                    mailbox.send(follower, self._last)

    def take_over(self, version: int, mailbox: Mailbox) -> None:
        """A successor at this version repeats the last choice, or reports it lost if it died with the predecessor."""
        step = version - 1
        if step >= 0 and (self._last is None or self._last.number != step):
            self.make(step, ())
        self.tell(mailbox, mailbox.peers())

    def state(self) -> list[Any]:
        return [self._last.number, self._last.x] if self._last is not None else []

    def load(self, state: list[Any]) -> None:
        if state:
            self.make(state[0], state[1].tolist())
