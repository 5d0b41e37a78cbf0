"""Detects which peers of a mailbox have certainly ended, and when each of the others was last known to be reachable."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping

from paceline.transport.connections import Peer
from paceline.transport.local_socket import is_refused

# In peer deadlines: how long after the last sign of life a refused connection shows that a peer has ended.
_CERTAIN_FOR = 4


class EndDetector:
    """Tells peers that have ended from peers that cannot be reached.

    A peer has ended if it has said bye, or if its machine refuses connections to its address soon after its last sign of life.
    A refusal much later shows nothing: the others may have gone on without this worker, and ended. For the same reason a peer
    that comes back has given a sign of life only once a message has come from it.

    Args:
        peer_deadline_s: how long a peer may be silent before the mailbox counts it as lost.
    """

    def __init__(self, peers: Mapping[int, Peer], peer_deadline_s: float) -> None:
        self._peers, self._peer_deadline_s = peers, peer_deadline_s
        # Of `look`; a gap: this process was stopped, or did not read.
        self._ticks_s = deque([time.monotonic()], maxlen=3)

    def has_ended(self, worker_id: int, incarnation: int) -> bool:
        """Whether an incarnation of a peer has certainly ended."""
        peer = self._peers[worker_id]
        self._look_at(peer)
        return peer.died >= incarnation

    def heard_s(self, worker_id: int) -> float:
        """When a peer was last known to be reachable, in seconds of `time.monotonic`."""
        peer = self._peers[worker_id]
        return time.monotonic() if peer.here else peer.heard_s

    def addresses(self) -> dict[int, tuple[int, str]]:
        """The newest incarnations and addresses of all peers that are known."""
        return {one: (peer.incarnation, peer.endpoint) for one, peer in self._peers.items() if peer.endpoint}

    # Called by the mailbox

    def look(self, *, has_read_all: bool = True) -> None:
        """Looks at lost peers, so that an end is noticed soon after it.

        The mailbox calls it regularly, and says whether it has called `lose` for every connection that had ended.
        """
        for peer in self._peers.values():
            if peer.met:
                self._look_at(peer)
        if has_read_all:
            self._ticks_s.append(time.monotonic())

    def lose(self, peer: Peer) -> None:
        if peer.received or peer.heard_s == -math.inf:
            peer.heard_s = self._ticks_s[0] - self._peer_deadline_s

    def succeed(self, peer: Peer, incarnation: int, endpoint: str) -> None:
        """Notes that a new process has taken a peer's place, which does not show that the earlier one has ended."""
        if not peer.endpoint or (self._is_certain(peer) and is_refused(peer.endpoint)):
            peer.died = incarnation - 1
        peer.incarnation, peer.endpoint, peer.heard_s = incarnation, endpoint, -math.inf

    def _look_at(self, peer: Peer) -> None:
        incarnation = peer.incarnation
        if peer.endpoint and not peer.here and not peer.ended and self._is_certain(peer) and is_refused(peer.endpoint):
            peer.died = max(peer.died, incarnation)

    def _is_certain(self, peer: Peer) -> bool:
        return not peer.met or time.monotonic() - peer.heard_s < _CERTAIN_FOR * self._peer_deadline_s
