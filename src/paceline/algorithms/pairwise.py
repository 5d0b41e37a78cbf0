"""Averaging in pairs, beside the training: AD-PSGD's second program.

One exchange joins a worker that requests it, with a copy s_i of its parameters, and one that answers with a copy s_j:

    the answering worker    x_j <- x_j + (s_i - s_j) / 2     s_j copied in the same instant: exactly the pair's mean
    the requesting worker   x_i <- x_i + (s_j - s_i) / 2     when the answer comes

The two changes are opposite, so the sum over all workers never moves, whatever either writes meanwhile. If nothing was
written, both hold the pair's mean.

Nobody can wait in a circle. Where the graph is bipartite only active workers request and passive ones only answer; a passive
worker that wants an average invites an active neighbour to request one. Elsewhere everyone does both, and a worker that waits
for an answer itself lets requests from lower ids wait, refuses those from higher ids, and takes a request from the very worker
it waits for as the answer: a chain of waiting workers then has ascending ids, and cannot close.

A worker that ends takes part in one more exchange, so that nobody's own model is left as its last gradient made it. It then
stays for its neighbours' last exchanges, a second at most, and tells those who are not done that it is gone: they ask somebody
else, and need no deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from paceline.algorithms.deadline import MeasuredDeadline
from paceline.errors import PeerLostError
from paceline.topology import Topology
from paceline.transport.base import (
    Concurrency,
    Event,
    Joinable,
    Lock,
    Message,
    PeerBack,
    PeerLeft,
    Ports,
    Received,
)

__all__ = ["PairwiseAveraging"]

# Other kinds are not for this program.
_KINDS = ("turn", "end", "invite", "request", "answer", "busy", "done", "gone", "model?")
_LONGEST_PAUSE_TURNS = 64
_FEW = 16  # partners for whose last exchanges a worker stays
_STAY_S = 1.0
_TURN, _INVITE, _LAST_INVITE = Message("turn"), Message("invite"), Message("invite", 1)
_DONE, _GONE = Message("done"), Message("gone")
_END, _END_AFTER_ONE_MORE = Message("end"), Message("end", 1)


@dataclass(slots=True)
class _Request:
    """An exchange that this worker began."""

    peer: int
    number: int
    sent: torch.Tensor  # (P,)
    begun_s: float
    until_s: float  # from then on it counts as failed
    turns_left: int  # partners that may yet be tried for this turn


class PairwiseAveraging:
    """The communication program of one worker, and what its compute program says to it.

    Args:
        topology: who may average with whom.
        peers: a partner is drawn at `random`, or they take turns (`rotate`).
        ports: this worker's.
        lock: held by whoever reads or writes `ports.shared.x`.
    """

    def __init__(self, topology: Topology, peers: Literal["random", "rotate"], ports: Ports, lock: Lock) -> None:
        assert ports.mailbox is not None
        self._topology = topology
        self._rotates = peers == "rotate"
        self._ports = ports
        self._mailbox = ports.mailbox
        self._lock = lock
        self._shared: Any = ports.shared
        self._x: torch.Tensor = ports.shared.x
        self._counts = ports.counts
        self._random = ports.random
        self._now_s = ports.clock.now_s
        self._program: Joinable | None = None
        is_fixed = topology.period(ports.num_workers) == 1
        self._fixed_partners = topology.partners(ports.worker_id, ports.num_workers) if is_fixed else None
        self._reachable: Set[int] = frozenset()  # as the mailbox last said, and the partners among them
        self._reachable_partners: list[int] = []
        roles = topology.bipartite_roles(ports.num_workers)
        self._requests = roles is None or ports.worker_id in roles.active
        self._deadline = MeasuredDeadline()
        self._num_turns = 0
        # Lists, as they are nearly always empty: a deque takes 600 bytes, and there may be thousands of simulated workers.
        self._wanted: list[int | None] = []  # exchanges to begin: with an inviting worker, or with anyone
        self._waiting: list[tuple[int, Message]] = []  # requests from lower ids, until our own exchange is over
        self._own: _Request | None = None
        self._late: dict[int, _Request] = {}  # given up, by number; the answer may still come
        self._number = 0
        self._ended = False
        self._awaited: tuple[int, float] | None = (
            None  # after the end: whose request is the last to be answered, until when
        )
        self._stays_until_s = (
            -math.inf
        )  # after the end; infinity: as long as its own last exchange takes, and then some
        self._met: set[int] = set()
        self._done: set[int] = set()  # partners that want no more averages
        self._gone: set[int] = set()  # partners whose programs have ended, though they may still be reached
        # By peer: the turn from which it may be tried again, and the length of the pause until then.
        self._pauses: dict[int, tuple[int, int]] = {}

    # What the compute program calls

    @contextmanager
    def in_background(self, concurrency: Concurrency) -> Iterator[None]:
        """Averages as long as the `with` lasts, and once more; after an exception, until the exchange under way is over."""
        self._program = concurrency.serve(self._mailbox, _KINDS, self.handle, "averaging")
        end = _END
        try:
            yield
            end = _END_AFTER_ONE_MORE
        finally:
            self._mailbox.send(self._ports.worker_id, end)
            self._program.join()

    def turn(self) -> None:
        """Asks for one average with a neighbour; does not wait for it."""
        if self._program is not None and self._program.failed():
            self._program.join()  # raises what it raised
        self._mailbox.send(self._ports.worker_id, _TURN)

    def take_model(self) -> None:
        """Copies a neighbour's parameters, for a worker that comes late; keeps its own where nobody answers."""
        for peer in self._partners():
            if peer not in self._mailbox.peers():
                continue
            try:
                self._mailbox.send(peer, Message("model?"))
            except PeerLostError:
                continue
            answer = self._mailbox.receive(self._deadline.value_s, kind="model", sender=peer)
            if isinstance(answer, Received) and answer.message.x is not None:
                with self._lock, self._shared.writing():
                    self._x.copy_(answer.message.x)
                return

    # The communication program

    def handle(self, event: Event | None) -> float | None:
        """Requests, answers and averages until it is told to end; as `Concurrency.serve` says."""
        if isinstance(event, Received):
            self._take(event.sender, event.message)
        else:
            self._note(event)
        if self._own is None:
            self._begin_next()
        if self._own is not None:
            return max(0.0, self._own.until_s - self._now_s())
        if not self._ended:
            return math.inf
        if self._awaited is not None:
            return max(0.0, self._awaited[1] - self._now_s())
        return self._stay()

    def _note(self, event: PeerLeft | PeerBack | None) -> None:
        match event:
            case None:
                if self._own is not None and self._now_s() >= self._own.until_s:
                    self._give_up()
                elif self._awaited is not None and self._now_s() >= self._awaited[1]:
                    self._counts.peer_failures += 1
                    self._awaited = None
            case PeerLeft(peer=peer):
                self._late = {number: one for number, one in self._late.items() if one.peer != peer}
                if self._own is not None and self._own.peer == peer:
                    self._counts.peer_failures += 1
                    self._try_another(self._own)
                self._is_gone(peer)
            case PeerBack(peer=peer):
                self._pauses.pop(peer, None)
                self._done.discard(peer)
                self._gone.discard(peer)

    def _take(self, peer: int, message: Message) -> None:
        match message.kind:
            case "turn":
                self._num_turns += 1
                self._want_one()
            case "invite":
                self._met.add(peer)
                if not self._ended or message.number:
                    self._want(peer)
            case "request":
                self._met.add(peer)
                self._pauses.pop(peer, None)
                self._requested(peer, message)
            case "answer":
                self._met.add(peer)
                self._pauses.pop(peer, None)
                self._answered(peer, message.number, message.x)
            case "busy":
                if self._own is not None and self._own.number == message.number:
                    self._try_another(self._own)
            case "model?":
                with self._lock:
                    self._send(peer, Message("model", x=self._x))
            case "done":
                self._done.add(peer)
            case "gone":
                self._gone.add(peer)
                if self._own is not None and self._own.peer == peer:
                    self._try_another(self._own)
                self._is_gone(peer)
            case "end":
                self._ended = True
                self._wanted.clear()
                if message.number:
                    self._stays_until_s = math.inf
                    self._want_last()

    # The end

    def _want_last(self) -> None:
        if self._requests:
            self._want(None)
            return
        peer = self._choose()
        self._awaited = None
        if peer is not None and self._send(peer, _LAST_INVITE):
            self._awaited = peer, self._now_s() + self._deadline.value_s

    def _is_gone(self, peer: int) -> None:
        """A partner will not ask for an average any more."""
        if self._awaited is not None and self._awaited[0] == peer:
            self._want_last()

    def _stay(self) -> float | None:
        """For how long it still answers those who make their last exchange, its own being made; None: it is gone."""
        fixed, reachable = self._fixed_partners, self._mailbox.peers()
        stays = fixed is not None and len(fixed) <= _FEW
        partners = fixed if fixed is not None and stays else sorted(self._met)
        if self._stays_until_s == math.inf:
            self._stays_until_s = self._now_s() + _STAY_S
            for peer in partners if stays else ():
                if peer in reachable:
                    self._send(peer, _DONE)
        waiting = [peer for peer in partners if peer in reachable and peer not in self._done and peer not in self._gone]
        left_s = self._stays_until_s - self._now_s()
        if stays and waiting and left_s > 0:
            return left_s
        for peer in waiting:
            self._send(peer, _GONE)
        return None

    # Requesting

    def _want_one(self) -> None:
        if self._requests:
            self._want(None)
            return
        peer = self._choose()
        if peer is not None:
            self._send(peer, _INVITE)

    def _want(self, peer: int | None) -> None:
        """Once per partner: where gradients are faster than the network, it averages as often as the network can."""
        if peer not in self._wanted:
            self._wanted.append(peer)

    def _begin_next(self) -> None:
        """Begins the next exchange that is wanted, after answering those that had to wait."""
        if self._waiting:
            self._answer_waiting()
        while self._wanted and self._own is None:
            peer = self._wanted.pop(0)
            peer = self._choose() if peer is None else peer
            if peer is not None and peer not in self._gone:
                self._request(peer, turns_left=len(self._partners()) - 1)

    def _request(self, peer: int, turns_left: int) -> None:
        with self._lock:
            sent = self._x.clone()
        self._number += 1
        now_s = self._now_s()
        own = _Request(peer, self._number, sent, now_s, now_s + self._deadline.value_s, turns_left)
        self._own = own if self._send(peer, Message("request", self._number, 0.0, sent)) else None

    def _choose(self) -> int | None:
        """The next partner; None: there is none."""
        partners = self._possible()
        if not partners:
            return None
        if self._rotates:
            return partners[(self._number + self._num_turns) % len(partners)]
        return self._random.choice(partners)

    def _possible(self) -> list[int]:
        """The partners that can be reached and are not paused."""
        reachable, pauses = self._mailbox.peers(), self._pauses
        if reachable is not self._reachable or self._fixed_partners is None:
            self._reachable = reachable
            self._reachable_partners = [peer for peer in self._partners() if peer in reachable]
        partners = self._reachable_partners
        if self._gone:
            partners = [peer for peer in partners if peer not in self._gone]
        if pauses:
            partners = [peer for peer in partners if pauses.get(peer, (0, 0))[0] <= self._num_turns]
        return partners

    def _partners(self) -> tuple[int, ...]:
        if self._fixed_partners is not None:
            return self._fixed_partners
        return self._topology.partners(self._ports.worker_id, self._ports.num_workers, self._num_turns)

    def _try_another(self, failed: _Request) -> None:
        self._own = None
        self._answer_waiting()  # a request that waits must not cross one of ours to the same partner: only one would count
        others = [peer for peer in self._possible() if peer != failed.peer]
        if failed.turns_left > 0 and others:
            self._request(self._random.choice(others), failed.turns_left - 1)

    def _give_up(self) -> None:
        """The deadline has passed: the partner is left alone for a while, each time for longer."""
        own = self._own
        assert own is not None
        self._counts.peer_failures += 1
        self._late[own.number] = own
        length = min(_LONGEST_PAUSE_TURNS, 2 * self._pauses.get(own.peer, (0, 1))[1])
        self._pauses[own.peer] = (self._num_turns + length, length)
        self._own = None

    def _answered(self, peer: int, number: int, x: torch.Tensor | None) -> None:
        own = self._own
        if own is not None and own.number == number and own.peer == peer:
            self._own = None
            self._deadline.add(self._now_s() - own.begun_s)
        else:
            own = self._late.pop(number, None)  # too late for us, but the partner has done its half
        if own is not None and x is not None:
            with self._lock:
                self._move(x, own.sent)

    # Answering

    def _requested(self, peer: int, request: Message) -> None:
        own = self._own
        if own is None:
            self._answer(peer, request)
        elif peer == own.peer:  # both requested at once: each has the other's copy
            self._answered(peer, own.number, request.x)
        elif peer < self._ports.worker_id:
            self._waiting.append((peer, request))
        else:
            self._send(peer, Message("busy", request.number))

    def _answer_waiting(self) -> None:
        while self._waiting:
            self._answer(*self._waiting.pop(0))

    def _answer(self, peer: int, request: Message) -> None:
        assert request.x is not None
        with self._lock:
            if self._send(peer, Message("answer", request.number, 0.0, self._x)):
                self._move(request.x, self._x)
                self._awaited = None

    # Both

    def _move(self, there: torch.Tensor, here: torch.Tensor) -> None:
        """X <- x + (there - here) / 2, under the lock."""
        shared = self._shared
        with shared.writing():
            self._x.add_(there - here, alpha=0.5)
            shared.advance()
        self._counts.averages += 1

    def _send(self, to: int, message: Message) -> bool:
        """Whether the message is on its way."""
        try:
            self._mailbox.send(to, message)
        except PeerLostError:
            self._counts.peer_failures += 1
            return False
        return True
