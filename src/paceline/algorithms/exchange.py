"""Pairwise averages of one worker, and why they preserve the sum of all models.

An exchange joins a worker that requests it, with a snapshot s_i of its parameters, and one that answers with a copy s_j:

    the answering worker    x_j <- x_j + (s_i - s_j) / 2     s_j copied in the same instant: exactly the pair's mean
    the requesting worker   x_i <- x_i + (s_j - s_i) / 2     when the answer comes

The two changes are opposite, so the sum over all workers never moves, even if either worker writes meanwhile, provided that
the requesting worker applies every answer, however late, with the snapshot of that request. So a worker keeps a request until
it is resolved, by one of these:

    answer              the partner has applied its half, and this worker applies its own; the weight is the number of seconds
                        for which the partner has held the request
    busy                no half is applied: the partner refused the request, or dropped it because it was withdrawn
    answered            a reply to a withdrawal: an answer was sent earlier; if it is missing, its connection lost it
    the partner's end   all that it sent has arrived; or it died, and its model is gone

A request whose deadline passes is withdrawn and set aside, and the next exchange does not wait for it. Messages between two
workers keep their order, so the reply to a withdrawal arrives within a round trip, after the answer if there is one.

Two crossing requests of one pair make one exchange, as each worker then has the other's snapshot. The worker with the higher
id answers the other's request without a vector, and both use the snapshots they received. The worker with the lower id keeps
the other's request until its own is resolved. Either of the two may have been set aside by then.

Exchanges cannot deadlock. A worker that waits for an answer refuses requests from higher ids, and holds those from lower ids
until its own exchange is over: a chain of waiting workers has ascending ids, and cannot close.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paceline.algorithms.deadline import MeasuredDeadline
from paceline.errors import PeerLostError
from paceline.ports.checks import checked_vector
from paceline.ports.ports import Lock, Message, PeerLeft, Ports, Received
from paceline.ports.shared import ReplicatedParameters

_MOST_ASIDE = 4  # each keeps a snapshot; a worker with so many begins no more exchanges until one is resolved
_INCARNATION_NUMBERS = 1 << 40  # numbers of a dead worker's requests must not recur at its successor
COPIED = -1  # as the version of one's own vector: another worker's has replaced it


def move(x: torch.Tensor, there: torch.Tensor, here: torch.Tensor) -> None:
    """Makes one half of an average, x <- x + (there - here) / 2; all are (P,)."""
    x.add_(there - here, alpha=0.5)


@dataclass(slots=True)
class Request:
    """An exchange that this worker began."""

    peer: int
    number: int
    snapshot: torch.Tensor  # (P,)
    version: int  # of the snapshot
    begun_s: float
    until_s: float  # then it is withdrawn
    turns_left: int  # partners still to try for this turn
    theirs: Message | None = None  # a crossing request of the peer, which has the higher id
    asked: bool = False  # whether the peer was asked how it was resolved
    is_cut: bool = False  # whether the peer became unreachable since, so that messages may be lost


class Exchanges:
    """Requests, answers and the two halves of every average of one worker."""

    def __init__(self, ports: Ports[ReplicatedParameters], lock: Lock, deadline: MeasuredDeadline) -> None:
        assert ports.mailbox is not None
        self._me = ports.worker_id
        self._mailbox = ports.mailbox
        self._shared: Any = ports.shared
        self._x: torch.Tensor = ports.shared.x
        self._lock = lock  # held while a program reads or writes `ports.shared.x`
        self._deadline = deadline  # how long to wait for an answer; it learns from every answer, including late ones
        self._counts = ports.counts
        self._moved = ports.moved
        self._now_s = ports.clock.now_s
        self._first_number = self._number = ports.incarnation * _INCARNATION_NUMBERS
        self._decided = ports.decided
        self.own: Request | None = None  # the exchange whose answer this worker waits for
        self.aside: dict[int, Request] = {}  # by partner, its unresolved request that this worker no longer waits for
        # A list, as it is nearly always empty: a deque takes 600 bytes, and there may be thousands of simulated workers.
        # Requests from lower ids, answered when this worker's own exchange is over, and when each arrived.
        self.held: list[tuple[int, Message, float]] = []
        self._answered: dict[int, int] = {}  # by partner: its last request that was answered
        # By partner: its withdrawn request whose outcome could not be sent.
        self._untold: dict[int, int] = {}

    # Requesting

    def has_room(self) -> bool:
        """Whether one more request could be set aside; gives up the oldest whose partner has left, if that makes room."""
        if len(self.aside) < _MOST_ASIDE:
            return True
        reachable = self._mailbox.peers()
        lost = next((peer for peer in self.aside if peer not in reachable), None)
        if lost is None:
            return False
        del self.aside[lost]
        self._counts.unresolved_exchanges += 1
        return True

    def begin(self, peer: int, turns_left: int) -> None:
        """Requests an exchange with a partner to which no request is set aside."""
        with self._lock:
            snapshot, version = self._x.clone(), self._shared.version
            self._moved(2)
        self._number += 1
        if self.send(peer, Message("request", self._number, 0.0, snapshot, self.stamped(version))):
            now_s = self._now_s()
            until_s = now_s + self._deadline.value_s
            self.own = Request(peer, self._number, snapshot, version, now_s, until_s, turns_left)

    def withdraw(self) -> None:
        """Sets aside this worker's exchange, whose deadline has passed."""
        own = self.own
        assert own is not None
        self._set_aside(own)
        self.ask_about(own.peer)

    def ask_about(self, peer: int) -> None:
        """Asks a partner, once, about the outcome of the request that was set aside."""
        request = self.aside[peer]
        if not request.asked:
            request.asked = self.send(peer, Message("withdraw", request.number))

    def ask_about_all(self) -> None:
        for peer in self.expected():
            self.ask_about(peer)

    def expected(self) -> list[int]:
        """The reachable partners with an unresolved request."""
        if not self.aside:
            return []
        reachable = self._mailbox.peers()
        return [peer for peer in self.aside if peer in reachable]

    def give_up(self) -> None:
        """Counts the requests left unresolved when this worker ends."""
        self._counts.unresolved_exchanges += len(self.aside)
        self.aside.clear()

    def answered(self, received: Received) -> None:
        """Makes this worker's half when an answer arrives.

        Raises:
            MalformedMessageError: the answer's vector does not match this worker's.
        """
        peer, _, answer = received
        if answer.x is not None:
            checked_vector(received, self._x)
        request = self._resolve(peer, answer.number)
        if request is None:
            return
        took_s = self._now_s() - request.begun_s
        self._deadline.add(took_s)
        held_s = answer.weight  # by the partner, whose own exchange may have been with a third worker
        self._counts.note_partner(peer, min(took_s, max(0.0, took_s - held_s)))
        x, version, theirs = answer.x, answer.version, request.theirs
        if x is None and theirs is not None and theirs.number == answer.version:
            x, version, theirs = theirs.x, theirs.version, None
        if x is None:
            self._counts.unresolved_exchanges += 1
        else:
            with self._lock:
                self._move(peer, x, version, request.snapshot, request.version)
        if theirs is not None:
            self._refuse(peer, theirs)

    def refused(self, peer: int, number: int, *, was_answered: bool = False) -> Request | None:
        """Ends a request without an answer; returns the request if it was this worker's current one.

        If it `was_answered`, the partner has applied its half, and its answer was lost with the connection.
        """
        own = self.own
        request = self._resolve(peer, number)
        if request is None:
            return None
        self._counts.unresolved_exchanges += was_answered
        if request.theirs is not None:
            self._refuse(peer, request.theirs)
        return request if request is own else None

    def _resolve(self, peer: int, number: int) -> Request | None:
        """Forgets a request, and returns it; None: it was resolved before."""
        own = self.own
        if own is not None and own.number == number and own.peer == peer:
            self.own = None
            return own
        request = self.aside.get(peer) if self.aside else None
        if request is None or request.number != number:
            return None
        del self.aside[peer]
        return request

    def _set_aside(self, own: Request) -> None:
        self.aside[own.peer] = own
        self.own = None

    # Answering

    def requested(self, received: Received) -> bool:
        """Answers a request, refuses it, or holds it until this worker's exchange is over; returns whether it was answered.

        Raises:
            MalformedMessageError: its vector does not match this worker's.
        """
        peer, _, request = received
        checked_vector(received, self._x)
        own = self.own
        crossed = own if own is not None and own.peer == peer else self.aside.get(peer)
        if crossed is not None and peer > self._me:
            crossed.theirs = request
        elif crossed is not None and not crossed.is_cut:
            return self._answer_crossed(peer, request, crossed)
        elif own is None:
            return self._answer(peer, request)
        elif peer > self._me:
            self._refuse(peer, request)
        else:
            self.held.append((peer, request, self._now_s()))
        return False

    def answer_held(self) -> None:
        while self.held:
            peer, request, since_s = self.held.pop(0)
            self._answer(peer, request, self._now_s() - since_s)

    def withdrawn(self, peer: int, number: int) -> None:
        """Tells the outcome of a withdrawn request, and drops it if it was not answered."""
        self._drop_held(peer)
        if not self.send(peer, Message("answered" if number <= self._answered.get(peer, -1) else "busy", number)):
            self._untold[peer] = number

    def requesters(self) -> list[int]:
        """The partners whose requests were answered, ascending."""
        return sorted(self._answered)

    def _drop_held(self, peer: int) -> None:
        if self.held:
            self.held = [one for one in self.held if one[0] != peer]

    def _refuse(self, peer: int, request: Message) -> None:
        self.send(peer, Message("busy", request.number))

    def _answer(self, peer: int, request: Message, held_s: float = 0.0) -> bool:
        assert request.x is not None
        with self._lock:
            version = self._shared.version
            if not self.send(peer, Message("answer", request.number, held_s, self._x, self.stamped(version))):
                return False
            self._answered[peer] = request.number
            self._move(peer, request.x, request.version, self._x, version)
        return True

    def _answer_crossed(self, peer: int, request: Message, own: Request) -> bool:
        """Answers without a vector: this worker's own request has already sent its snapshot."""
        assert request.x is not None
        with self._lock:
            if not self.send(peer, Message("answer", request.number, version=own.number)):
                return False
            self._answered[peer] = request.number
            self._resolve(peer, own.number)
            self._move(peer, request.x, request.version, own.snapshot, own.version)
        return True

    # Partners that come and go

    def left(self, event: PeerLeft) -> Request | None:
        """A partner has left; returns this worker's exchange if it was with that partner."""
        peer = event.peer
        if event.reason == "ended":  # all that it sent has arrived
            return self.gone(peer)
        self._drop_held(peer)  # if it comes back, it asks for their outcome
        own = self.own if self.own is not None and self.own.peer == peer else None
        if own is not None:
            self._set_aside(own)
        request = self.aside.get(peer)
        if request is not None:
            request.is_cut, request.asked = True, False
        return own

    def back(self, peer: int) -> None:
        """A partner is back, or another incarnation of it, which has answered nothing yet."""
        untold = self._untold.pop(peer, None)
        if untold is not None:
            self.withdrawn(peer, untold)
        if peer in self.aside:
            self.ask_about(peer)

    def gone(self, peer: int) -> Request | None:
        """A partner has stopped averaging, and all its messages have arrived; returns this worker's exchange with it."""
        self._drop_held(peer)
        request = self.aside.pop(peer, None)
        if request is not None and request.is_cut:  # an answer may have been lost while it was unreachable
            self._counts.unresolved_exchanges += 1
        own = self.own
        if own is None or own.peer != peer:
            return None
        self.own = None
        return own

    # Both

    def _move(self, peer: int, there: torch.Tensor, at: int, here: torch.Tensor, of: int) -> None:
        """Makes one half, under the lock, with a partner's vector of stamped version `at`, and an own one of version `of`."""
        shared = self._shared
        with shared.writing():
            move(self._x, there, here)
            self._moved(6)
            version = shared.advance(updates=0)
        self.note(version, peer, at, of)
        self._counts.averages += 1

    def stamped(self, version: int) -> int:
        """A version of this worker's vector, with its incarnation, for a partner's `note`."""
        return self._first_number + version

    def note(self, version: int, peer: int, at: int, of: int) -> None:
        """Records for replays what made this version of the worker's vector; `at` is the partner's stamped version."""
        incarnation, at = divmod(at, _INCARNATION_NUMBERS)
        self._decided(version, peer=peer, at=at, of=of, peer_incarnation=incarnation)

    def send(self, to: int, message: Message) -> bool:
        """Sends a message; returns whether the peer was reachable."""
        try:
            self._mailbox.send(to, message)
        except PeerLostError:
            self._counts.peer_failures += 1
            return False
        return True
