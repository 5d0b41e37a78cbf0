"""The averages of one worker with others, and what keeps the sum of all models where it is.

One exchange joins a worker that requests it, with a snapshot s_i of its parameters, and one that answers with a copy s_j:

    the answering worker    x_j <- x_j + (s_i - s_j) / 2     s_j copied in the same instant: exactly the pair's mean
    the requesting worker   x_i <- x_i + (s_j - s_i) / 2     when the answer comes

The two changes are opposite, so the sum over all workers never moves, whatever either writes meanwhile, provided that every
answer is applied by the worker that asked for it, with the snapshot of that very request, however late it comes. So a request
stays known until it is resolved, by one of these:

    answer              the partner has made its half, and this worker makes its own
    busy                neither makes any: the partner has refused, or has dropped the request because it was withdrawn
    answered            a reply to a withdrawal: an answer was sent before; if it has not come, it was lost with its connection
    the partner's end   all that it sent has come before; or it died, and its model is gone

A request whose deadline passes is withdrawn and set aside, and the next exchange does not wait for it. Messages between two
workers keep their order, so the reply to a withdrawal comes within a round trip, and after the answer if there is one.

Two requests of one pair that cross make one exchange, as each worker then has the other's snapshot. The worker of the higher
id says so: it answers the other's request without a vector, and both use what they were sent. The worker of the lower id keeps
the request that it got until its own is resolved. Which of the two has been set aside by then does not matter.

Nobody can wait in a circle. A worker that waits for an answer refuses requests from higher ids, and holds those from lower ids
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

__all__ = ["Exchanges", "Request"]

_MOST_ASIDE = 4  # each keeps a snapshot; a worker with so many begins no more exchanges until one is resolved
_INCARNATION_NUMBERS = 1 << 40  # an answer to a dead worker's request must not look like one to its successor's


@dataclass(slots=True)
class Request:
    """An exchange that this worker began."""

    peer: int
    number: int
    snapshot: torch.Tensor  # (P,)
    begun_s: float
    until_s: float  # then it is withdrawn
    turns_left: int  # partners that may yet be tried for this turn
    theirs: Message | None = None  # a request of the peer's, of a higher id, that has crossed this one
    asked: bool = False  # whether the peer was asked what became of it
    is_cut: bool = False  # whether the peer was lost from sight since, and messages with it


class Exchanges:
    """Requests, answers and the two halves of every average of one worker.

    Args:
        ports: this worker's.
        lock: held while a program reads or writes `ports.shared.x`.
        deadline: how long to wait for an answer; it learns from every answer, the late ones included.

    Attributes:
        own: the exchange whose answer this worker waits for.
        aside: by partner, the one request to it that is not waited for any more and is not resolved yet.
        held: requests from lower ids, to be answered when the own exchange is over.
    """

    def __init__(self, ports: Ports[ReplicatedParameters], lock: Lock, deadline: MeasuredDeadline) -> None:
        assert ports.mailbox is not None
        self._me = ports.worker_id
        self._mailbox = ports.mailbox
        self._shared: Any = ports.shared
        self._x: torch.Tensor = ports.shared.x
        self._lock = lock
        self._deadline = deadline
        self._counts = ports.counts
        self._moved = ports.moved
        self._now_s = ports.clock.now_s
        self._number = ports.incarnation * _INCARNATION_NUMBERS
        self.own: Request | None = None
        self.aside: dict[int, Request] = {}
        # A list, as it is nearly always empty: a deque takes 600 bytes, and there may be thousands of simulated workers.
        self.held: list[tuple[int, Message]] = []
        self._answered: dict[int, int] = {}  # by partner: its last request that was answered
        # By partner: its withdrawn request, of which it could not be told what became.
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
            snapshot = self._x.clone()
            self._moved(2)
        self._number += 1
        if self.send(peer, Message("request", self._number, 0.0, snapshot)):
            now_s = self._now_s()
            self.own = Request(peer, self._number, snapshot, now_s, now_s + self._deadline.value_s, turns_left)

    def withdraw(self) -> None:
        """Sets the own exchange aside, whose deadline has passed."""
        own = self.own
        assert own is not None
        self._set_aside(own)
        self.ask_about(own.peer)

    def ask_about(self, peer: int) -> None:
        """Lets a partner say, once, what became of the request to it that was set aside."""
        request = self.aside[peer]
        if not request.asked:
            request.asked = self.send(peer, Message("withdraw", request.number))

    def ask_about_all(self) -> None:
        """The same of all partners that can be reached."""
        for peer in self.expected():
            self.ask_about(peer)

    def expected(self) -> list[int]:
        """The partners that can be reached and have yet to say what became of a request."""
        if not self.aside:
            return []
        reachable = self._mailbox.peers()
        return [peer for peer in self.aside if peer in reachable]

    def give_up(self) -> None:
        """Counts what is not resolved at this worker's end."""
        self._counts.unresolved_exchanges += len(self.aside)
        self.aside.clear()

    def answered(self, received: Received) -> None:
        """An answer has come: makes this worker's half.

        Raises:
            MalformedMessageError: it has another vector than this worker's.
        """
        peer, _, answer = received
        if answer.x is not None:
            checked_vector(received, self._x)
        request = self._resolve(peer, answer.number)
        if request is None:
            return
        self._deadline.add(self._now_s() - request.begun_s)
        x, theirs = answer.x, request.theirs
        if x is None and theirs is not None and theirs.number == answer.version:
            x, theirs = theirs.x, None
        if x is None:
            self._counts.unresolved_exchanges += 1
        else:
            with self._lock:
                self._move(x, request.snapshot)
        if theirs is not None:
            self._refuse(peer, theirs)

    def refused(self, peer: int, number: int, *, was_answered: bool = False) -> Request | None:
        """No answer will come; returns the own exchange if it was that.

        Args:
            peer: the partner that says so.
            number: the request's.
            was_answered: it has made its half, and its answer was lost with the connection.
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
        """Answers a request, refuses it, or keeps it until the own exchange is over; whether it has answered.

        Raises:
            MalformedMessageError: it is none.
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
            self.held.append((peer, request))
        return False

    def answer_held(self) -> None:
        """Answers the requests that were held."""
        while self.held:
            self._answer(*self.held.pop(0))

    def withdrawn(self, peer: int, number: int) -> None:
        """Says what became of a request, and drops it if it was not answered."""
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

    def _answer(self, peer: int, request: Message) -> bool:
        assert request.x is not None
        with self._lock:
            if not self.send(peer, Message("answer", request.number, 0.0, self._x)):
                return False
            self._answered[peer] = request.number
            self._move(request.x, self._x)
        return True

    def _answer_crossed(self, peer: int, request: Message, own: Request) -> bool:
        """Answers with the snapshot that the other worker has from this one's own request already."""
        assert request.x is not None
        with self._lock:
            if not self.send(peer, Message("answer", request.number, version=own.number)):
                return False
            self._answered[peer] = request.number
            self._resolve(peer, own.number)
            self._move(request.x, own.snapshot)
        return True

    # Partners that come and go

    def left(self, event: PeerLeft) -> Request | None:
        """A partner has left; returns the own exchange if it was with that one."""
        peer = event.peer
        if event.reason == "ended":  # all that it sent has come before
            return self.gone(peer)
        self._drop_held(peer)  # it asks what became of them, should it come back
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
        """A partner averages no more, and all that it sent has come; returns the own exchange if it was with that one."""
        self._drop_held(peer)
        request = self.aside.pop(peer, None)
        if request is not None and request.is_cut:  # an answer may have been lost when it was out of sight
            self._counts.unresolved_exchanges += 1
        own = self.own
        if own is None or own.peer != peer:
            return None
        self.own = None
        return own

    # Both

    def _move(self, there: torch.Tensor, here: torch.Tensor) -> None:
        """Makes one half, x <- x + (there - here) / 2, under the lock."""
        shared = self._shared
        with shared.writing():
            self._x.add_(there - here, alpha=0.5)
            self._moved(6)
            shared.advance(updates=0)
        self._counts.averages += 1

    def send(self, to: int, message: Message) -> bool:
        """Whether the message is on its way."""
        try:
            self._mailbox.send(to, message)
        except PeerLostError:
            self._counts.peer_failures += 1
            return False
        return True
