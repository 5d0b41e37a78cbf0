"""The partners that a worker may average with now."""

from __future__ import annotations

from collections.abc import Container, Set
from typing import Literal

from paceline.algorithms.topology import Topology
from paceline.ports.ports import Ports
from paceline.ports.shared import SharedParameters

_LONGEST_PAUSE_TURNS = 64


class Partners:
    """A worker's neighbours in the graph: which are reachable, paused, or have stopped averaging."""

    def __init__(self, topology: Topology, peers: Literal["random", "rotate"], ports: Ports[SharedParameters]) -> None:
        assert ports.mailbox is not None
        self._rotates = peers == "rotate"
        self._mailbox = ports.mailbox
        self._random = ports.random
        period = topology.period(ports.num_workers)
        self._at_steps = [topology.partners(ports.worker_id, ports.num_workers, step) for step in range(period)]
        # All neighbours at any step, ascending.
        self.ever = (
            self._at_steps[0] if period == 1 else tuple(sorted({one for step in self._at_steps for one in step}))
        )
        self.turn = 0  # number of averages that the worker has requested: the step of a time-varying graph
        self.done: set[int] = set()  # partners that begin no more exchanges
        self.gone: set[int] = set()  # partners whose averaging has ended, though they may still be reachable
        self._is_late = ports.incarnation > 0
        self._heard: set[int] = set()  # partners that have sent a message since they last connected
        self._returned: set[int] = set()  # partners that were unreachable at some time
        # By partner: the turn that ends its pause, and the pause's length.
        self._pauses: dict[int, tuple[int, int]] = {}
        self._reachable: Set[int] = frozenset()  # as the mailbox last said, and the partners among them
        self._reachable_partners: list[int] = []

    def now(self) -> tuple[int, ...]:
        """The partners at this step, reachable or not."""
        return self._at_steps[self.turn % len(self._at_steps)]

    def possible(self) -> list[int]:
        """The partners at this step that are reachable, not gone and not paused."""
        reachable = self._mailbox.peers()
        if reachable is not self._reachable or len(self._at_steps) > 1:
            self._reachable = reachable
            self._reachable_partners = [peer for peer in self.now() if peer in reachable]
        partners = self._reachable_partners
        if self.gone:
            partners = [peer for peer in partners if peer not in self.gone]
        if self._pauses:
            partners = [peer for peer in partners if self._pauses.get(peer, (0, 0))[0] <= self.turn]
        return partners

    def choose(self, num_requests: int) -> int | None:
        partners = self.possible()
        if not partners:
            return None
        if self._rotates:
            return partners[(num_requests + self.turn) % len(partners)]
        return self._random.choice(partners)

    def others(self, than: Container[int]) -> list[int]:
        return [peer for peer in self.possible() if peer not in than]

    def pause(self, peer: int) -> None:
        """Skips a partner for some turns, each time for twice as many."""
        length = min(_LONGEST_PAUSE_TURNS, 2 * self._pauses.get(peer, (0, 1))[1])
        self._pauses[peer] = (self.turn + length, length)

    def hears(self, peer: int) -> None:
        self._heard.add(peer)
        if self._pauses:
            self._pauses.pop(peer, None)

    def may_be_over(self, peer: int) -> bool:
        """Whether a partner may have stopped averaging before it knew this worker, and so could not tell it."""
        return peer not in self._heard and (self._is_late or peer in self._returned)

    def leaves(self, peer: int) -> None:
        """A partner has left or is unreachable."""
        self._heard.discard(peer)
        self._returned.add(peer)

    def is_back(self, peer: int) -> None:
        """Starts over with a partner that had left."""
        self._pauses.pop(peer, None)
        self.done.discard(peer)
        self.gone.discard(peer)
