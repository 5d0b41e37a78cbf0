"""Pairwise averaging in the background of training: AD-PSGD's second program.

`exchange.py` implements the averages and shows why they lose nothing and cannot deadlock, `partners.py` chooses partners, and
`last_exchange.py` ends the program. This module decides when averages start.

In a bipartite graph only active workers request and passive ones only answer; a passive worker that wants an average invites
an active neighbour to request one. In any other graph every worker does both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from paceline.algorithms.deadline import MeasuredDeadline
from paceline.algorithms.exchange import COPIED, Exchanges, Request
from paceline.algorithms.last_exchange import Ending, Step
from paceline.algorithms.partners import Partners
from paceline.algorithms.topology import Topology
from paceline.errors import PeerLostError
from paceline.optim.model_state import digest, from_bytes, to_bytes
from paceline.ports.checks import MalformedMessageError, checked_number, checked_vector
from paceline.ports.ports import (
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
from paceline.ports.shared import ReplicatedParameters

# The kinds of messages that this program handles.
_KINDS = (
    "turn", "end", "invite", "request", "answer", "busy", "withdraw", "answered", "done", "gone", "model?", "state?",
)  # fmt: skip
_OWN_KINDS = ("turn", "end")  # sent by the compute program
_TURN, _INVITE = Message("turn"), Message("invite")
_END, _END_AFTER_ONE_MORE = Message("end"), Message("end", 1)


class PairwiseAveraging:
    """The communication program of one worker, and the interface that its compute program calls."""

    def __init__(
        self,
        topology: Topology,  # which workers may average with each other
        peers: Literal["random", "rotate"],  # draw partners at `random`, or take turns (`rotate`)
        ports: Ports[ReplicatedParameters],
        lock: Lock,  # held while a program reads or writes `ports.shared.x`
        deadline: MeasuredDeadline | None = None,  # how long to wait for a partner; None: measured from the start
    ) -> None:
        assert ports.mailbox is not None
        self._ports = ports
        self._mailbox = ports.mailbox
        self._lock = lock
        self._shared: Any = ports.shared
        self._x: torch.Tensor = ports.shared.x
        self._counts = ports.counts
        self._random = ports.random
        self._now_s = ports.clock.now_s
        self._program: Joinable | None = None
        roles = topology.bipartite_roles(ports.num_workers)
        self._requests = roles is None or ports.worker_id in roles.active
        self._deadline = deadline or MeasuredDeadline()
        self._partners = Partners(topology, peers, ports)
        self._exchanges = Exchanges(ports, lock, self._deadline)
        self._wanted: list[int | None] = []  # exchanges to begin: with an inviting worker, or with anyone
        self._num_requests = 0
        self._ending: Ending | None = None

    # Called by the compute program

    @contextmanager
    def in_background(self, concurrency: Concurrency) -> Iterator[None]:
        """Averages until the `with` block ends, then once more; after an exception, only finishes running exchanges."""
        self._program = concurrency.serve(self._mailbox, _KINDS, self.handle, "averaging")
        end = _END
        try:
            yield
            end = _END_AFTER_ONE_MORE
        finally:
            self._mailbox.send(self._ports.worker_id, end)
            self._program.join()

    def turn(self) -> None:
        """Requests one average with a neighbour without waiting for it."""
        if self._program is not None and self._program.failed():
            self._program.join()  # raises what it raised
        self._mailbox.send(self._ports.worker_id, _TURN)

    def take_model(self) -> None:
        """Copies a neighbour's model to a worker that joins late; keeps its own if none answers."""
        for peer in self._partners.now():
            if peer not in self._mailbox.peers():
                continue
            try:
                self._mailbox.send(peer, Message("model?"))
            except PeerLostError:
                continue
            answer = self._mailbox.receive(self._deadline.value_s, kind="model", sender=peer)
            if not isinstance(answer, Received):
                continue
            try:
                x = checked_vector(answer, self._x)
            except MalformedMessageError:
                self._counts.peer_failures += 1
                continue
            with self._lock, self._shared.writing():
                self._x.copy_(x)
                self._ports.moved(2)
                self._exchanges.note(self._shared.version, peer, answer.message.version, COPIED)
            for number, tensor in enumerate(self._ports.untrained):
                self._take_untrained(peer, number, tensor)
            return

    def _take_untrained(self, peer: int, number: int, tensor: torch.Tensor) -> None:
        with contextlib.suppress(PeerLostError, MalformedMessageError):
            self._mailbox.send(peer, Message("state?", number, x=torch.tensor(digest(tensor), device=tensor.device)))
            answer = self._mailbox.receive(self._deadline.value_s, kind="state", sender=peer, number=number)
            if isinstance(answer, Received) and answer.message.x is not None:
                from_bytes(tensor, checked_vector(answer, torch.empty(tensor.nbytes, dtype=torch.uint8, device="meta")))

    # The communication program

    def handle(self, event: Event | None) -> float | None:
        """Handles one event; returns how long to wait for the next, as `Concurrency.serve` expects."""
        exchanges = self._exchanges
        if isinstance(event, Received):
            try:
                self._take(event)
            except MalformedMessageError:
                self._counts.peer_failures += 1
        elif event is not None:
            self._note(event)
        elif exchanges.own is not None and self._now_s() >= exchanges.own.until_s:
            self._counts.peer_failures += 1
            self._partners.pause(exchanges.own.peer)
            exchanges.withdraw()
        if exchanges.own is None and (self._wanted or exchanges.held):
            self._begin_next()
        if exchanges.own is not None:
            return max(0.0, exchanges.own.until_s - self._now_s())
        return math.inf if self._ending is None else self._ending.go_on()

    def _note(self, event: PeerLeft | PeerBack) -> None:
        if isinstance(event, PeerBack):
            self._partners.is_back(event.peer)
            self._exchanges.back(event.peer)
            return
        self._partners.leaves(event.peer)
        failed = self._exchanges.left(event)
        self._counts.peer_failures += failed is not None
        self._is_gone(event.peer, failed)

    def _take(self, received: Received) -> None:
        exchanges, partners = self._exchanges, self._partners
        peer, _, message = received
        if (message.kind in _OWN_KINDS) != (peer == self._ports.worker_id):
            raise MalformedMessageError(peer, message, "to one that is not itself")
        match message.kind:
            case "turn":
                partners.turn += 1
                self._want_one()
            case "invite":
                if self._ending is None or message.number:
                    self._want(peer)
            case "request":
                partners.hears(peer)
                if exchanges.requested(received) and self._ending is not None:
                    self._ending.answered()
            case "answer":
                partners.hears(peer)
                exchanges.answered(received)
            case "busy" | "answered":
                partners.hears(peer)
                failed = exchanges.refused(peer, message.number, was_answered=message.kind == "answered")
                if failed is not None:
                    self._try_another(failed)
            case "withdraw":
                exchanges.withdrawn(peer, message.number)
            case "model?":
                with self._lock:
                    version = exchanges.stamped(self._shared.version)
                    exchanges.send(peer, Message("model", x=self._x, version=version))
            case "state?":
                tensor = self._ports.untrained[checked_number(received, message.number, 0, len(self._ports.untrained))]
                own = torch.tensor(digest(tensor))
                is_alike = torch.equal(checked_vector(received, own).cpu(), own)
                exchanges.send(
                    peer, Message("state", message.number, x=None if is_alike else to_bytes(tensor).to(tensor.device))
                )
            case "done":
                partners.done.add(peer)
            case "gone":
                partners.gone.add(peer)
                self._is_gone(peer, exchanges.gone(peer))
            case "end":
                self._end(orderly=bool(message.number))

    def _is_gone(self, peer: int, failed: Request | None) -> None:
        """A partner accepts no more requests; `failed`: this worker's exchange, if it was with that partner."""
        if failed is not None:
            self._try_another(failed)
        if self._ending is not None:
            self._ending.is_gone(peer)

    def _end(self, *, orderly: bool) -> None:
        self._wanted.clear()
        if orderly and self._requests:
            self._want(None)
        self._ending = Ending(
            self._partners, self._exchanges, self._deadline, self._ports, requests=self._requests, orderly=orderly
        )

    # Requesting

    def _want_one(self) -> None:
        if self._requests:
            self._want(None)
            return
        peer = self._partners.choose(0)
        if peer is not None:
            self._exchanges.send(peer, _INVITE)

    def _want(self, peer: int | None) -> None:
        """Queues at most one exchange per partner: if gradients outpace the network, the network sets the rate."""
        if peer not in self._wanted:
            self._wanted.append(peer)
        if peer is not None and peer in self._exchanges.aside:
            self._exchanges.ask_about(peer)

    def _begin_next(self) -> None:
        exchanges = self._exchanges
        exchanges.answer_held()
        for wanted in tuple(self._wanted):
            if exchanges.own is not None or not exchanges.has_room():
                return
            if wanted is not None and wanted in exchanges.aside:
                continue  # until the last exchange with it is resolved
            self._wanted.remove(wanted)
            peer = self._choose() if wanted is None else wanted
            if peer is not None and peer not in self._partners.gone:
                self._request(peer, len(self._partners.now()) - 1)

    def _choose(self) -> int | None:
        """A partner for an exchange without an invitation; None if none is left or this worker has announced its end."""
        if self._ending is not None and self._ending.step is not Step.LAST_EXCHANGE:
            return None
        while (peer := self._partners.choose(self._num_requests)) is not None and peer in self._exchanges.aside:
            self._exchanges.ask_about(peer)
            self._partners.pause(peer)
        return peer

    def _request(self, peer: int, turns_left: int) -> None:
        self._num_requests += 1
        self._exchanges.begin(peer, turns_left)

    def _try_another(self, failed: Request) -> None:
        """Asks another partner in place of one that refused or left, at most once per partner."""
        exchanges = self._exchanges
        exchanges.answer_held()
        if failed.turns_left == 0 or (self._ending is not None and self._ending.step is not Step.LAST_EXCHANGE):
            return
        others = self._partners.others({failed.peer, *exchanges.aside})
        if others and exchanges.has_room():
            self._request(self._random.choice(others), failed.turns_left - 1)
