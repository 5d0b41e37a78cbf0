"""A worker's side of a parameter server: gradients go out in shards, parameters come back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from paceline.algorithms.server.incoming import state_to_bytes
from paceline.algorithms.server.pushed import PushCodec
from paceline.algorithms.server.update import COUNTED, DROPPED
from paceline.algorithms.server.worker_copy import WorkerCopy
from paceline.compression.codec import Codec, NoCodec
from paceline.errors import PeerLostError, UsageError, WorkerLostError
from paceline.optim.rows import Rows, Selection
from paceline.optim.settings import OptimizerSettings, check_rows
from paceline.ports.checks import MalformedMessageError, checked_number, checked_weight
from paceline.ports.lookups import Lookups
from paceline.ports.ports import Message, PeerBack, PeerLeft, Ports, Received
from paceline.ports.replica import Replica
from paceline.ports.shared import ServedParameters

_RETURN_DEADLINE_S = 60.0  # for a server that takes a dead one's place
_MOST_MALFORMED = 10  # answers to one request
_FINAL = -1  # the number of the last request
_PUSHES = ("push", "push-only")


class Answer(NamedTuple):
    """The outcome of an update, as the first shard reports it."""

    applied_version: int  # -1: it was dropped
    version: int  # of the parameters in `Client.x`

    def record(self, replica: Replica) -> None:
        """Records what became of the replica's last gradient."""
        if self.applied_version > 0:
            # A worker cannot know the newest version when its gradient was ready: staleness counts from arrival. That is
            # before the update if the rule lets gradients wait.
            arrived = min(self.applied_version, self.version)
            replica.applied(self.applied_version, gradient_version=arrived - 1)
        elif self.applied_version == COUNTED:
            replica.accrued()
        else:
            replica.dropped(gradient_version=self.version)


class Client:
    """Sends updates to all shards and waits for their answers.

    If a server dies, the client waits for its successor and resends unanswered messages. The sequence number tells the
    successor whether it has applied that already. If its predecessor had answered, the client sends it the number of this
    worker's last update while it waits for the other shards.
    """

    def __init__(
        self,
        ports: Ports[ServedParameters],  # the worker's; `ports.shared.x` (P,) becomes what the servers send
        codec: Codec | None = None,  # of gradients; None: they are not coded
        *,
        aligned: bool = False,  # whether all shards' parameters must have one version, as when shard 0 chooses for all
        by_workers_optimizer: bool = False,  # whether the worker's own optimizer makes steps, at the servers or here
        fetched: Callable[[torch.Tensor], None] = lambda x: None,  # called with `x` whenever all of it has come
    ) -> None:
        assert ports.mailbox is not None
        self.x = ports.shared.x  # the parameters (P,)
        self._copy = WorkerCopy(ports)
        self.version = 0  # their version, as the first shard counts
        # Number of the last update; counts from 1, or, for a late worker, from the number that the servers send.
        self.sequence = 0
        self._mailbox = ports.mailbox
        self._now_s = ports.clock.now_s
        self._counts = ports.counts
        self._first_server = ports.num_workers
        self._ranges = ports.shared.ranges
        self._shards = range(ports.num_servers)
        self._push_codec = PushCodec(codec if codec is not None else NoCodec(), ports)
        self._selections: list[Selection] | None = None  # of each shard: the elements that the last gradient has
        self._settings: OptimizerSettings | None = None
        self._told: Message | None = None
        self._state: Callable[[], dict[str, torch.Tensor]] = dict
        self._aligned, self._by_workers_optimizer, self._fetched = aligned, by_workers_optimizer, fetched
        self._num_fetches = self._num_exchanges = 0
        self._decided = ports.decided
        self._under_way: dict[int, Message] = {}  # by shard: requests that `finish` waits for
        self._has_met = False
        self._clocks: dict[int, int] = {}  # shard -> clock of what it sent, where told in the last exchange
        self._clock_of_next: dict[int, int] = {}  # shard -> clock of the parameters that it sends next
        self._left: dict[int, tuple[str, float]] = {}  # shard -> why its server has left, and when this was heard

    def follow(self, lookups: Lookups | None) -> None:
        """Gets rows of these tables only when they are looked up; call before `join`. None: there are no such tables."""
        if lookups is not None:
            self._copy.follow(lookups)
            self._send_all(self._tables())
            lookups.begin(self.x, self._look_up, self._hold_whole)

    def _look_up(self, rows: Rows, into: torch.Tensor) -> None:
        number = self._next_fetch()
        wanted = self._copy.look_up(number, rows, into)
        self._request({shard: Message("lookup", number, x=one.to_bytes()) for shard, one in wanted.items()})

    def _hold_whole(self) -> None:
        self._copy.hold_whole()
        self._request(self._tables())  # a shard that missed this would leave tables out of its answers

    def _tables(self) -> dict[int, Message]:
        """What tells each shard which tables are looked up; acknowledged."""
        number = self._next_fetch()
        return {shard: Message("tables", number, x=self._copy.tables(shard).to_bytes()) for shard in self._shards}

    def _next_fetch(self) -> int:
        """The number of another request that is no update."""
        self._num_fetches += 1
        return _FINAL - self._num_fetches

    def join(self) -> None:
        """Joins the run; waits for the parameters; raises RunStopped if the run ended before a server started."""
        self._exchange([Message("join") for _ in self._shards], in_order=True)

    def tell(self, settings: OptimizerSettings, state: Callable[[], dict[str, torch.Tensor]] = dict) -> None:
        """Tells the servers which optimizer applies this worker's gradients, if that has changed.

        The first call also sends the optimizer's loaded `state`, as vectors (P,); a server keeps the first it receives.
        """
        if settings != self._settings:
            if self._settings is not None and settings.name != self._settings.name:
                raise UsageError(
                    f"A server cannot continue with {settings.name} instead of {self._settings.name}: start a new run."
                )
            if self._settings is None:
                self._state = state
                self._send_state(self._shards)
            self._settings = settings
            self._told = Message("settings", x=settings.to_tensor())
            for shard in self._shards:
                self._send(shard, self._told)

    def _send_state(self, shards: Iterable[int]) -> None:
        state = self._state()
        for shard in shards if state else ():
            self._send(shard, Message("state", x=state_to_bytes(state, self._ranges[shard])))

    def push(self, gradient: torch.Tensor, num_samples: int, rows: Rows | None = None, *, fetch: bool = True) -> Answer:
        """Sends a gradient, the mean over `num_samples`, and waits for the parameters for the next one.

        Args:
            gradient: (P,), or the elements that `rows` select (count,).
            num_samples: of its batch.
            rows: that it has; None: it has all elements.
            fetch: if False, waits only for the decision on the gradient: `x` and `version` stay unchanged.
        """
        self.start_push(gradient, num_samples, rows, fetch=fetch)
        answer = self.finish()
        assert answer is not None
        return answer

    def start_push(
        self,
        gradient: torch.Tensor,
        num_samples: int,
        rows: Rows | None = None,
        *,
        versions: Sequence[int] | None = None,
        fetch: bool = True,
    ) -> None:
        """As `push`, without waiting: `finish` does. The gradient was computed at these `versions`; None: the newest."""
        self.sequence += 1
        self._selections = None
        settings = self._settings
        if settings is not None and self._by_workers_optimizer and (rows is not None or "SparseAdam" in settings.names):
            check_rows(settings, rows)
        if rows is not None:
            self._selections = selections = self._copy.selections(rows)
            payloads = list(gradient.split([one.count for one in selections]))
        else:
            payloads = self._push_codec.encode(gradient, settings.missing if settings is not None else ())
        kind = "push" if fetch else "push-only"
        versioned = zip(payloads, versions or self._copy.versions, strict=True)
        self._under_way = self._start([Message(kind, self.sequence, num_samples, *one) for one in versioned])

    def start_fetch(self) -> None:
        """As `fetch`, without waiting."""
        number = self._next_fetch()
        self._under_way = self._start([Message("fetch", number, self._copy.held(shard)) for shard in self._shards])

    def finish(self) -> Answer | None:
        """Waits for the answer to `start_push` or `start_fetch`, if there is one; returns the outcome of a push, else None."""
        requests, self._under_way = self._under_way, {}
        if not requests:
            return None
        answer = self._finish(requests)
        return answer if requests[0].kind in _PUSHES else None

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each shard's parameters in `x`."""
        return tuple(self._copy.versions)

    def before_own_step(self, rows: Rows | None) -> None:
        """The worker is about to step on `x` by itself, with a gradient of these rows; None: on all of it."""
        self._copy.before_own_step(rows)

    def fetch(self) -> None:
        """Waits for the newest parameters."""
        self.start_fetch()
        self.finish()

    def meet(self) -> None:
        """Announces that this worker waits at a meeting of all workers, so that servers do not make others wait for it."""
        self._request(dict.fromkeys(self._shards, Message("meet", self._next_fetch())))
        self._has_met = True

    def come_back(self) -> None:
        """Before a step that follows a meeting: waits for the newest parameters, as others may have trained meanwhile."""
        if self._has_met:
            self._exchange([Message("join", self.sequence) for _ in self._shards])

    def leave(self) -> None:
        """Says goodbye: no server waits for this worker from now on."""
        for shard in self._shards:
            self._send(shard, Message("bye", self.sequence))

    def final(self) -> None:
        """Waits for the final parameters, after all workers have left."""
        self._exchange([Message("final", _FINAL) for _ in self._shards])

    def _exchange(self, messages: list[Message], *, in_order: bool = False) -> Answer:
        return self._finish(self._start(messages), in_order=in_order)

    def _start(self, messages: list[Message]) -> dict[int, Message]:
        self._has_met = False
        self._num_exchanges += 1
        self._clocks.clear()
        return self._send_all(dict(enumerate(messages)))

    def _finish(self, requests: dict[int, Message], *, in_order: bool = False) -> Answer:
        """Waits until all shards have answered, and are in step."""
        answers = self._wait(requests, in_order=in_order)
        while self._clocks and (behind := [one for one in self._shards if self._clocks.get(one, 0) < self.sequence]):
            # One shard has a later clock for this worker: the other shards' parameters lack updates that it promises.
            self._request(dict.fromkeys(behind, Message("join", self.sequence)))
        versions = self._copy.versions
        while self._aligned and (newest := max(versions)) != min(versions):
            # Some shards were a step behind: they had refused this worker's gradient before that step.
            number = self._next_fetch()
            behind = [shard for shard in self._shards if versions[shard] < newest]
            self._request({one: Message("fetch", number, self._copy.held(one), version=newest) for one in behind})
        if requests[0].kind != "push-only":
            self._copy.all_came()
            self._fetched(self.x)
        for shard, answer in sorted(answers.items()):
            at = answer.version if requests[0].kind == "push-only" else versions[shard]
            self._decided(self._num_exchanges, peer=shard, at=at, of=answer.applied_version)
        self.version = versions[0]
        return answers[0]

    def _request(self, requests: dict[int, Message]) -> dict[int, Answer]:
        """Sends each shard its request, all before waiting for any; returns the answers."""
        return self._wait(self._send_all(requests))

    def _send_all(self, requests: dict[int, Message]) -> dict[int, Message]:
        # The first shard last: if it chooses whose gradients count, the others have this one by then.
        for shard in sorted(requests, reverse=True):
            self._send(shard, requests[shard])
        return requests

    def _wait(self, requests: dict[int, Message], *, in_order: bool = False) -> dict[int, Answer]:
        """Returns the answers to requests that have been sent.

        Waiting for one particular shard ends if the run is being stopped. So the client waits for shards one by one with
        `in_order`, and for a shard whose server has left until a successor takes over.
        """
        answers: dict[int, Answer] = {}
        begun_s, num_malformed = self._now_s(), 0
        while missing := requests.keys() - answers.keys():
            left = missing & self._left.keys()
            awaited = min(left or missing)
            sender = self._first_server + awaited if in_order or left else None
            match self._mailbox.receive(self._patience_s(awaited, begun_s), sender=sender):
                case Received(sender=sender) as received if (shard := sender - self._first_server) in self._shards:
                    try:
                        answer = self._hear(shard, received, requests.get(shard))
                    except MalformedMessageError as error:
                        num_malformed += 1
                        self._counts.peer_failures += 1
                        if num_malformed > _MOST_MALFORMED:
                            raise WorkerLostError(
                                f"Shard {shard} of the parameter server cannot be used: {error}"
                            ) from None
                        if shard in missing:  # the answer may have been that
                            self._send(shard, requests[shard])
                        continue
                    if answer is not None:
                        answers.setdefault(shard, answer)
                case PeerLeft(peer=peer, reason=reason) if (shard := peer - self._first_server) in self._shards:
                    self._left[shard] = (reason, self._now_s())
                    self._copy.forget(shard)
                    self._clock_of_next.pop(shard, None)  # a successor counts from what it knows
                case PeerBack(peer=peer) if (shard := peer - self._first_server) in self._shards:
                    self._left.pop(shard, None)
                    if self._copy.follows:
                        self._send(shard, self._tables()[shard])
                    if self._told is not None:
                        self._send_state([shard])
                        self._send(shard, self._told)
                    self._send(shard, requests[shard] if shard in missing else Message("clock", self.sequence))
                case None:
                    raise self._lost(awaited, self._left[awaited][0])
        return answers

    def _patience_s(self, shard: int, begun_s: float) -> float | None:
        """How long to wait for a successor of a shard's server that has left; None: no limit.

        Raises:
            WorkerLostError: the server has ended and will not answer.
        """
        if shard not in self._left:
            return None
        reason, since_s = self._left[shard]
        if reason == "ended":
            raise self._lost(shard, "its program has ended")
        return max(0.0, max(since_s, begun_s) + _RETURN_DEADLINE_S - self._now_s())

    def _lost(self, shard: int, why: str) -> WorkerLostError:
        return WorkerLostError(
            f"Shard {shard} of the parameter server has left ({why}) and no other process replaced it."
        )

    def _send(self, shard: int, message: Message) -> None:
        echo, server = self._copy.echoes[shard], self._first_server + shard
        selection = self._selections[shard] if self._selections is not None else None
        with contextlib.suppress(PeerLostError):  # requests are sent again when the server is back
            if selection is not None and message.kind in _PUSHES:
                held = self._copy.held(shard)
                self._mailbox.send(server, Message("rows", message.number, held, selection.to_bytes()))
            if echo is not None and message.kind in _PUSHES:
                echo = echo if selection is None else selection.take(echo)
                self._mailbox.send(server, Message("echo", message.number, x=echo))
            self._mailbox.send(server, message)

    def _hear(self, shard: int, received: Received, request: Message | None) -> Answer | None:
        """Handles a shard's message; returns its answer if it answers the request."""
        kind, number, _, _, version = received.message
        if kind in ("rows", "echo"):
            self._copy.hear(shard, received)
        elif kind == "clock":
            self._clock_of_next[shard] = checked_number(received, number)
        elif request is not None and number == request.number and kind in ("x", "ack"):  # else an answer given twice
            applied = checked_weight(received, least=-1)
            checked_number(received, version)
            if kind == "x":
                self._copy.take(shard, received)
            clock = self._clock_of_next.pop(shard, 0)
            if kind == "x" and (clock or request.kind == "join"):
                self._clocks[shard] = max(clock, number)
                self.sequence = max(self.sequence, clock)
            if request.kind in _PUSHES:
                self._push_codec.settle(shard, is_applied=applied != DROPPED)
            return Answer(applied, version)
        return None
