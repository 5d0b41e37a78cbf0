"""Means and sums by messages, among workers that have no supervisor, and go on without those that have died or left."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from paceline.errors import PeerLostError, RunStopped, WorkerLostError, name_workers
from paceline.optim.half_types import add_up, mean_into, to_sum_type
from paceline.ports.ports import Mailbox, Message, PeerBack, PeerLeft, Received
from paceline.ports.started import CarriedOutTogether, Operation
from paceline.transport.packed_vectors import packed, unpacked
from paceline.transport.round_header import Purpose, RoundHeader

__all__ = ["MessageCollectives"]

_PIECES, _MEANS, _VOTE, _VIEW, _BYE = _KINDS = ("round pieces", "round means", "round vote", "round view", "round bye")
_LOOK_EVERY_S = 0.1  # how often a wait checks whether this worker has been told to end
_PROBE_EVERY_S = 0.1  # how often a wait checks whether an unreachable worker has ended
_GRACE_S = 5.0  # how long a stopped worker helps the others to end the round
_REMEDY = "Start the workers again, or choose ad-psgd, which continues without a worker that stands still"
_AT_ONCE_BYTES = 1 << 20  # up to this size, a third message takes two members longer than adding up the whole vectors


class _Status(IntEnum):
    MEMBER = 0
    GONE = 1  # has died, or has left the run in order
    ENDED = 2  # its program has ended early


class _Part(NamedTuple):
    """A vector (n,) that a round replaces: by the sum over the members or, where they have weights, by the weighted mean."""

    vector: torch.Tensor
    is_mean: bool = False


class _State(NamedTuple):
    """What a worker says when the members of a round change."""

    view: int  # the number of the proposed view
    round: int  # the last one that it has begun
    prepared: int  # the view in which it has this round's result; -1: none


class MessageCollectives(CarriedOutTogether):
    """All-reduce over a mailbox; implements `Collectives` for methods that only sum and average.

    A round replaces all vectors that were started before its wait. Every member sends each other member its piece of the
    vectors, adds up the pieces that it receives, and sends the sum to all. Sums are in the order of ids, so they have the same
    bits as in shared memory. A worker that has all sums votes. Its round is over once it has the votes of all members.

    Members of a round are those of a numbered *view*. If a member dies or leaves, or if a connection broke, the others agree
    on the next view: each tells all how far it is and which workers it knows to be gone, until all have said the same number.
    If another member is in the next round already, this worker's round is over, with the result that it has. If all members
    have the round's result, it is over, too. Otherwise they repeat it in the new view.

    This is safe, because no worker ends a round that another member cannot end:

    - A worker ends a round by votes, or because all living members have its result. So every living member has it then.
    - A member without the result has never voted, so no worker has ended the round, and all have kept their vectors.
    - A worker takes part in a new view only after all its members have said that view's number. So results of two views of
      one round cannot mix.

    A worker is gone if it says so, or if its connection has ended and its machine says that no process listens at its
    address. A silent worker is not gone: the others wait for it, at most `deadline_s`.

    Costs per round of m members: 3 messages to each other one, with 2 (m - 1) / m of the vectors in all. Two members add up
    everything each, with 2 messages, up to 1 MB. No vector is sent while backward computes.

    Args:
        mailbox: through which all workers can be reached.
        worker_id: this worker.
        num_workers: of the run; all are members at first.
        has_ended: whether a worker's process is known to have ended.
        deadline_s: how long to wait for a worker that cannot be reached, but has not ended.
        stopped: whether this worker has been told to end.

    Attributes:
        purpose: of the next rounds, which must be the same on all members.
        members: the workers whose vectors the last result contains.
        waited_s: seconds spent in rounds; the caller reads it and sets it back to 0.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        worker_id: int,
        num_workers: int,
        *,
        has_ended: Callable[[int], bool],
        deadline_s: float = 600.0,
        stopped: Callable[[], bool] = lambda: False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._mailbox, self._worker_id, self._num_workers = mailbox, worker_id, num_workers
        self._has_ended, self._deadline_s, self._stopped, self._now_s = has_ended, deadline_s, stopped, now_s
        self.members: Sequence[int] = tuple(range(num_workers))
        self._next_members = self.members  # of the next round, or of its repetition
        self._statuses = [_Status.MEMBER] * num_workers
        self._view = self._proposed = self._round = 0
        self._prepared = -1
        self._parts: list[_Part] = []
        self._results: list[torch.Tensor] = []
        self._header = RoundHeader()  # of this worker's pieces
        self._total = 0.0  # of the numbers that travel with the weights
        self._received: dict[tuple[int, int, str, int], torch.Tensor | None] = {}  # by round, view, kind and sender
        self._states: dict[int, _State] = {}  # what each worker has said last
        self._unreachable: dict[int, float] = {}  # worker -> since when
        self._probe_at_s = self._stopped_s = math.inf
        self._has_left = False
        self.waited_s, self.purpose = 0.0, Purpose.STEP

    # Operations

    def all_reduce_mean(self, vector: torch.Tensor, weight: float, number: float = 0.0) -> float:
        """As in `Collectives`.

        Raises:
            WorkerLostError: a worker's program has ended early, or cannot be reached for longer than the deadline.
            RunStopped: this worker has been told to end, and waits for another one.
        """
        self.finish(self._num_started)
        self._run_round([_Part(vector, is_mean=True)], weight, number)
        return self._total

    def _carry_out(self, operations: list[Operation]) -> None:
        assert all(one.kind == "all-reduce" for one in operations)
        self._run_round([_Part(one.vector) for one in operations])

    def living(self) -> Sequence[int]:
        """As in `Survivors`."""
        self._run_round([])
        return self.members

    def kept(self, worker: int) -> int:
        """As in `Survivors`: the steps since the last mean are lost."""
        return 0

    def leave(self) -> None:
        """Tells the others that this worker takes part in no further round, so that they go on without it."""
        for other in self._others() if not self._has_left else ():
            self._send(other, Message(_BYE))
        self._has_left = True

    # A round

    def _run_round(self, parts: list[_Part], weight: float = 1.0, number: float = 0.0) -> None:
        if self._num_workers == 1:
            self._total = number
            return
        if self._has_left:
            raise RunStopped
        began_s = self._now_s()
        self._round += 1
        self._parts, self._results, self._prepared = parts, [], -1
        self._header = RoundHeader(weight, number, self.purpose, sum(part.vector.nbytes for part in parts))
        try:
            while not (self._ends_by_votes() or self._ends_by_change()):
                self._results, self._prepared = [], -1
        finally:
            self.waited_s += self._now_s() - began_s
        for part, result in zip(parts, self._results, strict=True):
            part.vector.copy_(result)
        self._received = {key: x for key, x in self._received.items() if key[0] > self._round}

    def _ends_by_votes(self) -> bool:
        """Tries to end the round in the present view; False once a newer one is proposed."""
        if self._proposed > self._view:
            return False
        if ended := [one for one, status in enumerate(self._statuses) if status is _Status.ENDED]:
            raise self._lost(ended, "had left its loop, by an error (see its output) or before the others")
        self.members = self._next_members
        for other in self._others():
            self._say(_PIECES, other, packed([self._header.vector(), *self._pieces_of(other)]))
        if not self._have_all(_PIECES):
            return False
        self._results = self._reduce()
        if self._is_cut:
            for other in self._others():
                self._say(_MEANS, other, packed(self._results))
            if not self._have_all(_MEANS):
                return False
            self._results = self._joined(self._results)
        self._prepared = self._view
        for other in self._others():
            self._say(_VOTE, other)
        return self._have_all(_VOTE)

    def _others(self) -> list[int]:
        return [one for one in self._next_members if one != self._worker_id]

    @property
    def _is_cut(self) -> bool:
        """Whether each member adds up a piece of every vector; else each adds up everything."""
        return len(self.members) > 2 or self._header.num_bytes > _AT_ONCE_BYTES

    def _slice_of(self, member: int, num_elements: int) -> slice:
        """What a member adds up of a vector."""
        place, of = (self.members.index(member), len(self.members)) if self._is_cut else (0, 1)
        return slice(num_elements * place // of, num_elements * (place + 1) // of)

    def _pieces_of(self, owner: int) -> list[torch.Tensor]:
        """What this worker gives to a member's part of the result; nothing to a mean in which it has no weight."""
        parts = [part for part in self._parts if self._header.weight or not part.is_mean]
        return [part.vector[self._slice_of(owner, len(part.vector))] for part in parts]

    def _reduce(self) -> list[torch.Tensor]:
        """This worker's part of each result."""
        me, header = self._worker_id, self._header.vector()
        headers = {one: RoundHeader.of(self._unpack(_PIECES, one, [header])[0]) for one in self._others()}
        headers[me] = self._header
        for one, other in headers.items():
            if why := other.why_unlike(self._header, me):
                raise self._lost([one], why)
        self._total = sum(headers[one].number for one in self.members)
        likes = [part.vector[self._slice_of(me, len(part.vector))] for part in self._parts]
        pieces = {me: likes}
        for one in self._others():
            given = zip(self._parts, likes, strict=True)
            brings = [like if headers[one].weight or not part.is_mean else like[:0] for part, like in given]
            _, *pieces[one] = self._unpack(_PIECES, one, [header, *brings])
        mine = [torch.empty_like(like) for like in likes]
        for place, (part, out) in enumerate(zip(self._parts, mine, strict=True)):
            if part.is_mean:
                total = to_sum_type(out)
                given = [(pieces[one][place], headers[one].weight) for one in self.members]
                mean_into(total, [(piece, weight) for piece, weight in given if weight])
                out.copy_(total)
            else:
                add_up([pieces[one][place] for one in self.members], out)
        return mine

    def _joined(self, mine: list[torch.Tensor]) -> list[torch.Tensor]:
        """The whole results."""
        results = [torch.empty_like(part.vector) for part in self._parts]
        for one in self.members:
            slices = [result[self._slice_of(one, len(result))] for result in results]
            found = mine if one == self._worker_id else self._unpack(_MEANS, one, slices)
            for out, piece in zip(slices, found, strict=True):
                out.copy_(piece)
        return results

    def _unpack(self, kind: str, sender: int, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Vectors like these, from a message of this round."""
        x = self._received[self._round, self._view, kind, sender]
        try:
            return unpacked(x if x is not None else torch.empty(0, dtype=torch.uint8), likes)
        except RuntimeError:
            raise self._lost([sender], "sent a message of another version of Paceline") from None

    def _say(self, kind: str, to: int, x: torch.Tensor | None = None) -> None:
        self._send(to, Message(kind, self._round, x=x, version=self._view))

    def _send(self, to: int, message: Message) -> None:
        with contextlib.suppress(PeerLostError):  # its event is on the way
            self._mailbox.send(to, message)

    # Events

    def _have_all(self, kind: str) -> bool:
        """Waits for a message from every other member; False if the view changes meanwhile."""
        keys = [(self._round, self._view, kind, one) for one in self._others()]
        while not all(key in self._received for key in keys):
            if self._proposed > self._view:
                return False
            self._hear()
        return True

    def _hear(self) -> None:
        """Waits a while for a message or an event."""
        if self._finds_somebody_gone():
            return
        match self._mailbox.receive(_LOOK_EVERY_S, kind=_KINDS):
            case Received(sender=sender, message=message):
                self._take(sender, message)
            case PeerLeft(peer=peer, reason=reason) if self._statuses[peer] is _Status.MEMBER:
                if reason == "ended":
                    self._lose(peer, _Status.ENDED)
                else:
                    self._miss(peer)
            case PeerBack(peer=peer) if self._statuses[peer] is _Status.MEMBER:
                # What was on its way is lost: all say again what they have to say.
                self._unreachable.pop(peer, None)
                self._propose(self._view + 1)
            case None:  # another receiver may have had a peer's event, as the run began
                for one in set(self._others()) - self._mailbox.peers():
                    self._miss(one)
            case _:
                pass
        if self._stopped():
            self._stopped_s = min(self._stopped_s, self._now_s())
            if self._now_s() - self._stopped_s > _GRACE_S:
                raise RunStopped

    def _miss(self, worker: int) -> None:
        if worker not in self._unreachable and self._statuses[worker] is _Status.MEMBER:
            self._unreachable[worker], self._probe_at_s = self._now_s(), -math.inf

    def _finds_somebody_gone(self) -> bool:
        """Looks whether workers that cannot be reached have ended, and for how long the others could not be."""
        if not self._unreachable or self._now_s() < self._probe_at_s:
            return False
        gone = [one for one in self._unreachable if self._has_ended(one)]
        for one in gone:
            self._lose(one, _Status.GONE)
        for one, since_s in self._unreachable.items():
            if self._now_s() - since_s > self._deadline_s:
                raise self._lost([one], f"could not be reached for {self._deadline_s:g} s. {_REMEDY}")
        self._probe_at_s = self._now_s() + _PROBE_EVERY_S
        return bool(gone)

    def _take(self, sender: int, message: Message) -> None:
        if message.kind == _BYE:
            self._lose(sender, _Status.GONE)
        elif message.kind == _VIEW:
            self._compare(sender, message)
        elif (message.number, message.version) >= (self._round, self._view):
            self._received[message.number, message.version, message.kind, sender] = message.x

    def _lost(self, who: Sequence[int], what_happened: str) -> WorkerLostError:
        return WorkerLostError(f"round {self._round}: {name_workers(sorted(who))} {what_happened}.")

    # Views

    def _lose(self, worker: int, status: _Status) -> None:
        self._unreachable.pop(worker, None)
        if self._statuses[worker] is _Status.MEMBER:
            self._statuses[worker] = status
            self._propose(self._view + 1)

    def _propose(self, view: int) -> None:
        """Proposes a view by a number that this worker has not said yet, because it knows more than when it said the last."""
        self._proposed = max(self._proposed + 1, view)

    def _compare(self, sender: int, message: Message) -> None:
        """Takes over what another worker knows about the members."""
        view, x = message.version, message.x
        if x is None or x.dtype != torch.int64 or len(x) != 1 + self._num_workers:
            raise self._lost([sender], "sent a message of another version of Paceline")
        prepared, *told = x.tolist()
        if view <= self._view:
            return
        statuses = tuple(map(_Status, told))
        self._states[sender] = _State(view, message.number, prepared)
        if statuses[self._worker_id] is not _Status.MEMBER:
            raise WorkerLostError(
                f"round {self._round}: the others have gone on without this worker, which they could not reach. {_REMEDY}"
            )
        self._statuses = [max(one) for one in zip(statuses, self._statuses, strict=True)]
        self._proposed = max(self._proposed, view)

    def _ends_by_change(self) -> bool:
        """Agrees with all living members on the next view, and on whether the round is over."""
        said: _State | None = None
        while True:
            living = [one for one in self._next_members if self._statuses[one] is _Status.MEMBER]
            state = _State(self._proposed, self._round, self._prepared)
            if state != said:
                said = self._states[self._worker_id] = state
                x = torch.tensor([self._prepared, *self._statuses])
                for other in living:
                    if other != self._worker_id:
                        self._send(other, Message(_VIEW, self._round, x=x, version=self._proposed))
            if all(one in self._states and self._states[one].view == self._proposed for one in living):
                return self._decide(living)
            self._hear()

    def _decide(self, living: Sequence[int]) -> bool:
        """Begins the view that all agree on; returns whether this worker's round is over."""
        states = [self._states[one] for one in living]
        is_behind = any(one.round > self._round for one in states)
        assert self._prepared >= 0 or not is_behind, "a round ended without this worker"
        alike = all((one.round, one.prepared) == (self._round, self._prepared) for one in states)
        self._view, self._next_members = self._proposed, tuple(living)
        return is_behind or (alike and self._prepared >= 0)
