"""Means and sums by messages, among workers that have no supervisor and continue without dead or departed workers."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from paceline.errors import ExcludedError, PeerLostError, RunStopped, WorkerLostError, name_workers
from paceline.ports.ports import NO_NUMBERS, Counts, Event, Handle, Mailbox, Message, PeerBack, PeerLeft, Received
from paceline.ports.started import CarriedOutTogether, Operation
from paceline.transport.ends import EndDetector
from paceline.transport.exchange import Exchange, Kinds
from paceline.transport.round_header import Purpose, RoundHeader
from paceline.transport.round_members import Progress, RoundMembers
from paceline.transport.round_vectors import Part, RoundVectors

ASK = "round ask"
_VOTE, _VIEW, _BYE = _OWN = ("round vote", "round view", "round bye")
_OF_ROUND = Kinds("round pieces", "round means")
_EARLY = Kinds("early pieces", "early means")
_KINDS = (*_OWN, *_OF_ROUND, *_EARLY, ASK)
_LEAST_EARLY_BYTES = 1 << 20
_EARLY_EXCHANGES = 8  # in a round, about: few, so that no worker waits until another one reads its messages
_LOOK_EVERY_S = 0.1  # how often a wait checks whether this worker has been told to end
_GRACE_S = 5.0  # how long a stopped worker helps the others to end the round


def _part(operation: Operation) -> Part:
    kind, vector, part, _ = operation
    match kind:
        case "all-reduce":
            return Part(vector, vector)
        case "all-gather":
            return Part(part, vector, kind)
        case "all-to-all":
            return Part(vector, part, kind)
    raise AssertionError(f"{kind} needs all workers")


class JoinRequest(NamedTuple):
    """A newcomer asks to be let in."""

    incarnation: int
    epoch: int  # that its loop has reached
    peers: frozenset[int]  # the workers that it can reach


class MessageCollectives(CarriedOutTogether):
    """All-reduce over a mailbox; implements `Collectives` for methods that only sum and average.

    A round replaces all vectors that were started before its wait. Every member sends each other member its piece of the
    vectors, adds up the pieces that it receives, and sends the sum to all. Sums are in the order of ids, so they have the same
    bits as in shared memory. A worker that has all sums votes. Its round is over once it has the votes of all members.

    Vectors that are started long before their round, as while backward computes, are added up early: once several have about
    an eighth of the last round's bytes, they are sent together. All members must do the same, so this happens only in a view
    in which the last round has ended by votes. In any other view, these vectors are part of the round.

    Members of a round are those of a numbered view (`RoundMembers`). Once all living members have proposed the next view, each
    knows how far the others are. If another member is in the next round already, this worker's round is over, with the result
    that it has. If all members have the round's result, it is over, too. Otherwise they repeat it in the new view.

    This is safe, because no worker ends a round that another member cannot end:

    - A worker ends a round by votes, or because all living members have its result. So every living member has it then.
    - A member without the result has never voted, so no worker has ended the round, and all have kept their vectors.
    - A worker takes part in a new view only after all its members have proposed it. So results of two views of one round
      cannot mix.

    The others wait `deadline_s` for a worker that cannot be reached and has not ended. Then the majority goes on without it,
    and the minority's rounds raise an error.

    Costs per round of m members: 3 messages to each other one, with 2 (m - 1) / m of the vectors in all. Two members add up
    everything each, with 2 messages, up to 1 MB. Early exchanges need 2 messages more each.

    Attributes:
        purpose: of the next rounds, which must be the same on all members.
        waited_s: seconds spent in rounds; the caller reads it and sets it back to 0.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        worker_id: int,
        num_workers: int,  # of the run; all are members at first
        *,
        ends: EndDetector,
        incarnations: Sequence[int] = (),
        deadline_s: float = 600.0,  # how long to wait for a worker that cannot be reached, but has not ended
        stopped: Callable[[], bool] = lambda: False,  # whether this worker has been told to end
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._mailbox, self._worker_id, self._num_workers = mailbox, worker_id, num_workers
        self._deadline_s, self._stopped, self._now_s = deadline_s, stopped, now_s
        self._next = RoundMembers(worker_id, num_workers, ends, incarnations, deadline_s, now_s)
        # The workers whose vectors the last result contains; also those that `let_in` has named since.
        self.members = self._next.ids
        self.requests: dict[int, JoinRequest] = {}  # of newcomers that wait for the members
        self._round, self._prepared = 0, -1  # the view in which this worker has the round's result; -1: none
        self._voted_in = 0  # the view in which the last round has ended by votes; -1: it has ended otherwise
        self._parts: list[Part] = []
        self._exchanges: list[Exchange] = []  # of this round
        self._header = RoundHeader()  # of this worker's pieces
        self._totals: list[float] = []  # of the numbers that travel with the weights
        self._received: dict[tuple[int, int, str, int], torch.Tensor | None] = {}  # by round, view, kind and sender
        self._early: list[Exchange] = []  # of operations that have been started, in the present view
        self._early_received: dict[tuple[int, int, str, int], torch.Tensor | None] = {}  # by first operation instead
        self._first_early = 1  # the first operation that may become part of an early exchange
        self._usual_bytes = 0  # of the operations of a round
        self._stopped_s = math.inf
        self.has_left = False  # whether this worker takes part in no further round
        self.waited_s, self.purpose = 0.0, Purpose.STEP
        self.counts: Counts | None = None  # are told whose message ended the wait; None: nothing is counted
        self._last_heard = worker_id

    # Operations

    def all_reduce_mean(
        self, vector: torch.Tensor, weight: float, numbers: Sequence[float] = NO_NUMBERS
    ) -> list[float]:
        """As in `Collectives`.

        Raises:
            WorkerLostError: a worker's program has ended early.
            ExcludedError: this worker could not reach the others for longer than the deadline.
            RunStopped: this worker has been told to end, and waits for another one.
        """
        self.finish(self._num_started)
        self._run_round([Part(vector, vector, "mean")], weight, numbers)
        return self._totals

    def _start(self, operation: Operation) -> Handle:
        started = super()._start(operation)
        self._exchange_early()
        return started

    def _exchange_early(self) -> None:
        """Sends vectors that have been started, if they are many, and goes on with those that have been sent."""
        if self._voted_in != self._next.view or self._next.changes or not self._next.others or self.has_left:
            self._first_early = self._num_started + 1
            return
        parts = list(map(_part, self._started[self._first_early - self._num_done - 1 :]))
        num_bytes = sum(part.vector.nbytes for part in parts)
        if num_bytes >= max(_LEAST_EARLY_BYTES, self._usual_bytes / _EARLY_EXCHANGES):
            header = RoundHeader(purpose=self.purpose, num_bytes=num_bytes)
            self._early.append(self._exchange(parts, header, _EARLY, self._first_early))
            self._first_early += len(parts)
        while (event := self._mailbox.receive(0.0, kind=_KINDS)) is not None:
            self._handle(event)
        for one in self._early:
            one.advance()

    def _carry_out(self, operations: list[Operation]) -> None:
        self._run_round(list(map(_part, operations)), early=self._early)
        self._usual_bytes = sum(one.vector.nbytes for one in operations)
        self._early, self._first_early = [], self._num_done + 1
        self._early_received = {key: x for key, x in self._early_received.items() if key[0] > self._num_done}

    def add_up(self, vector: torch.Tensor) -> None:
        """Replaces `vector` (n,) by the sum over all members; operations that have been started are not carried out."""
        self._run_round([Part(vector, vector)])

    def living(self) -> Sequence[int]:
        self._run_round([])
        return self.members

    def kept(self, worker: int) -> int:
        """As in `Survivors`: the steps since the last mean are lost."""
        return 0

    def leave(self) -> None:
        """Tells the others that this worker takes part in no further round, so that they go on without it.

        Call it again before the mailbox is closed, for those whose connection has broken meanwhile.
        """
        for other in self._mailbox.peers():  # also newcomers that the others are letting in
            self._tell_if_excluded(other, self.incarnation(other))
            self._send(other, Message(_BYE))
        self.has_left = True

    # Newcomers

    def let_in(self, newcomers: Mapping[int, int]) -> dict[str, Any]:
        """Takes newcomers, with their incarnations, into the next round; returns what they need for `enter`.

        All members call it between the same two rounds. The next one begins with an agreement on the members, so a newcomer
        that has died by then is left out.
        """
        self.members = tuple(sorted({*self.members, *newcomers}))
        done = self._num_started - len(self._started)
        return {"round": self._round, "done": done, "usual_bytes": self._usual_bytes, **self._next.let_in(newcomers)}

    def enter(self, given: dict[str, Any]) -> None:
        """Takes part from the next round on, with what `let_in` returned to a member."""
        self._round, self._usual_bytes = given["round"], given["usual_bytes"]
        self._num_started = self._num_done = given["done"]
        self._next.enter(given)
        self.members = self._next.ids

    def incarnation(self, worker: int) -> int:
        """The newest incarnation of a worker that is or was a member."""
        return self._next.incarnation(worker)

    def others_have_ended(self) -> bool:
        """Whether all other workers have ended, have never been reached, or are newcomers."""
        others = set(range(self._num_workers)) - self.requests.keys() - {self._worker_id}
        return not others & self._mailbox.peers() and self._next.have_ended(sorted(others))

    # A round

    def _run_round(
        self,
        parts: list[Part],
        weight: float = 1.0,
        numbers: Sequence[float] = NO_NUMBERS,
        early: Sequence[Exchange] = (),
    ) -> None:
        if self._num_workers == 1:
            self._totals = list(numbers)
            return
        if self.has_left:
            raise RunStopped
        began_s = self._now_s()
        if not self._next.others:  # it waits for no message, but must read newcomers' requests
            self._hear(timeout_s=0.0)
        self._round += 1
        self._parts, self._prepared, view = parts, -1, self._next.view
        self._header = RoundHeader(weight, self.purpose, sum(part.vector.nbytes for part in parts), tuple(numbers))
        try:
            while not ((has_votes := self._ends_by_votes(early)) or self._ends_by_change()):
                self._prepared, early = -1, ()
        finally:
            waited_s = self._now_s() - began_s
            self.waited_s += waited_s
        if self.counts is not None and self._next.others:
            self.counts.note_partner(self._last_heard, waited_s)
        for exchange in self._exchanges:
            exchange.vectors.write()
        self._exchanges = []  # which keep messages
        self._received = {key: x for key, x in self._received.items() if key[0] > self._round}
        self._voted_in = self._next.view if has_votes else -1
        if self._voted_in != view:
            self._early, self._first_early = [], self._num_started + 1

    def _ends_by_votes(self, early: Sequence[Exchange]) -> bool:
        """Sends, adds up and votes in the present view; returns whether the round is over."""
        if self._next.changes:
            return False
        if failed := self._next.failed:
            raise self._lost(failed, "had left its loop, by an error (see its output) or before the others")
        self.members = self._next.ids
        have_begun = {id(part.vector) for one in early for part in one.vectors.parts}
        parts = [part for part in self._parts if id(part.vector) not in have_begun]
        rest = self._exchange(parts, self._header, _OF_ROUND, self._round)
        self._exchanges = [rest, *early]
        if not self._hear_until(lambda: not [one for one in self._exchanges if not one.advance()]):
            return False
        self._totals = rest.vectors.totals
        self._prepared = self._next.view
        self._next.note_begun()
        for other in self._next.others:
            self._say(_VOTE, self._round, other)
        keys = [(self._round, self._next.view, _VOTE, one) for one in self._next.others]
        return self._hear_until(lambda: all(key in self._received for key in keys))

    def _exchange(self, parts: Sequence[Part], header: RoundHeader, kinds: Kinds, number: int) -> Exchange:
        vectors = RoundVectors(parts, self._num_workers, header, self._next.ids, self._worker_id, self._lost)
        received = self._early_received if kinds is _EARLY else self._received
        return Exchange(vectors, kinds, number, self._next.view, self._next.others, self._say, received)

    def _ends_by_change(self) -> bool:
        """Agrees with all living members on the next view, and on whether the round is over."""
        said = None
        while True:
            progress, knowledge = self._progress, self._next.knowledge
            if (progress, knowledge) != said:
                said = progress, knowledge
                for other in self._next.listeners:
                    self._propose(other)
            if self._next.is_agreed(progress):
                if missing := self._next.missing():
                    self._exclude_itself(
                        f"{name_workers(missing)} could not be reached for {self._deadline_s:g} s, and only a majority"
                        " of the workers may continue."
                    )
                return self._is_over(self._next.begin())
            self._hear()

    @property
    def _progress(self) -> Progress:
        return Progress(self._next.proposed, self._round, self._prepared)

    def _propose(self, to: int) -> None:
        progress = self._progress
        self._send(to, Message(_VIEW, progress.round, x=self._next.proposal(progress), version=progress.view))

    def _tell_if_excluded(self, peer: int, incarnation: int) -> None:
        if self._next.is_excluded(peer, incarnation):
            self._propose(peer)

    def _is_over(self, members: Sequence[Progress]) -> bool:
        """Whether this worker's round is over, given how far all members of the new view are."""
        is_behind = any(one.round > self._round for one in members)
        assert self._prepared >= 0 or not is_behind, "a round ended without this worker"
        alike = all((one.round, one.prepared) == (self._round, self._prepared) for one in members)
        return is_behind or (alike and self._prepared >= 0)

    def _say(self, kind: str, number: int, to: int, x: torch.Tensor | None = None) -> None:
        self._send(to, Message(kind, number, x=x, version=self._next.view))

    def _send(self, to: int, message: Message) -> None:
        with contextlib.suppress(PeerLostError):  # its event is on the way
            self._mailbox.send(to, message)

    # Events

    def _hear_until(self, have_all: Callable[[], bool]) -> bool:
        """Waits for messages from the other members; False if the view changes meanwhile."""
        while not have_all():
            if self._next.changes:
                return False
            self._hear()
        return True

    def _hear(self, timeout_s: float = _LOOK_EVERY_S) -> None:
        absent = self._next.absent()
        if (event := self._mailbox.receive(0.0 if absent else timeout_s, kind=_KINDS)) is not None:
            self._handle(event)
        elif absent:  # and have said nothing more, for example that this worker is excluded
            self._next.lose(absent)
        else:  # another receiver may have had a peer's event, as the run began
            for one in set(self._next.others) - self._mailbox.peers():
                self._next.miss(one)
        if self._stopped():
            self._stopped_s = min(self._stopped_s, self._now_s())
            if self._now_s() - self._stopped_s > _GRACE_S:
                raise RunStopped

    def _handle(self, event: Event) -> None:
        match event:
            case Received(sender=sender, incarnation=incarnation, message=message):
                self.take(sender, incarnation, message)
            case PeerLeft(peer=peer, incarnation=incarnation, reason=reason):
                if peer in self.requests and self.requests[peer].incarnation <= incarnation:
                    del self.requests[peer]
                self._next.disconnect(peer, incarnation, has_ended=reason == "ended")
            case PeerBack(peer=peer, incarnation=incarnation):
                self._next.restore(peer, incarnation)
                self._tell_if_excluded(peer, incarnation)

    def take(self, sender: int, incarnation: int, message: Message) -> None:
        if incarnation < self._next.incarnation(sender):
            return
        if message.kind == _BYE:
            self.requests.pop(sender, None)
            self._next.leave(sender, incarnation)
        elif message.kind == ASK:
            peers = message.x.tolist() if message.x is not None else []
            self.requests[sender] = JoinRequest(incarnation, message.number, frozenset(peers))
        elif message.kind == _VIEW:
            self._hear_proposal(sender, incarnation, message)
        elif message.kind in _EARLY:
            if message.version >= self._next.view:
                self._early_received[message.number, message.version, message.kind, sender] = message.x
        elif (message.number, message.version) >= (self._round, self._next.view):
            self._last_heard = sender
            self._received[message.number, message.version, message.kind, sender] = message.x

    def _hear_proposal(self, sender: int, incarnation: int, message: Message) -> None:
        try:
            is_member = self._next.hear(sender, incarnation, message.version, message.number, message.x)
        except ValueError:
            raise self._lost([sender], "sent a message of another version of Paceline") from None
        if not is_member:
            self._exclude_itself("the others have gone on without this worker, which they could not reach.")

    def _exclude_itself(self, why: str) -> NoReturn:
        self.leave()
        raise ExcludedError(f"round {self._named_round}: {why}")

    def _lost(self, who: Sequence[int], what_happened: str) -> WorkerLostError:
        return WorkerLostError(f"round {self._named_round}: {name_workers(sorted(who))} {what_happened}.")

    @property
    def _named_round(self) -> int:
        return self._round
