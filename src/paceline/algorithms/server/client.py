"""A worker's side of a parameter server: gradients go out in shards, parameters come back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from paceline.algorithms.server.incoming import state_to_bytes
from paceline.algorithms.server.pushed import PushCodec
from paceline.algorithms.server.update import COUNTED, DROPPED
from paceline.compression.codec import Codec, NoCodec
from paceline.errors import PeerLostError, UsageError, WorkerLostError
from paceline.optim.rows import Rows, Selection
from paceline.optim.settings import OptimizerSettings, check_rows
from paceline.ports.checks import MalformedMessageError, checked_number, checked_vector, checked_weight
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

    Args:
        ports: the worker's; `ports.shared.x` (P,) becomes what the servers send.
        codec: of gradients; None: they are not coded.
        aligned: whether all shards' parameters must have one version, as when shard 0 chooses for all.
        by_workers_optimizer: whether the worker's own optimizer makes steps, at the servers or here.

    Attributes:
        sequence: number of the last update; counts from 1, or, for a late worker, from the number that the servers send.
    """

    def __init__(
        self,
        ports: Ports[ServedParameters],
        codec: Codec | None = None,
        *,
        aligned: bool = False,
        by_workers_optimizer: bool = False,
    ) -> None:
        assert ports.mailbox is not None
        self.x = ports.shared.x  # the parameters (P,)
        self.version = 0  # their version, as the first shard counts
        self.sequence = 0
        self._mailbox = ports.mailbox
        self._moved = ports.moved
        self._now_s = ports.clock.now_s
        self._counts = ports.counts
        self._first_server = ports.num_workers
        self._ranges = ports.shared.ranges
        self._shards = range(ports.num_servers)
        self._versions = [0] * len(self._shards)
        self._push_codec = PushCodec(codec if codec is not None else NoCodec(), ports)
        self._echoes: list[torch.Tensor | None] = [None] * len(self._shards)
        self._selections: list[Selection] | None = None  # of each shard: the elements that the last gradient has
        self._changed: dict[int, tuple[int, Selection]] = {}  # shard -> number of a request, and what its answer has
        self._undo: list[tuple[Selection, torch.Tensor]] = []  # what own steps have changed, and its values before
        self._has_own = False  # whether own steps have changed all of `x` since it came
        self._settings: OptimizerSettings | None = None
        self._told: Message | None = None
        self._state: Callable[[], dict[str, torch.Tensor]] = dict
        self._aligned, self._by_workers_optimizer = aligned, by_workers_optimizer
        self._num_fetches = 0
        self._has_met = False
        self._clocks: dict[int, int] = {}  # shard -> clock of what it sent, where told in the last exchange
        self._clock_of_next: dict[int, int] = {}  # shard -> clock of the parameters that it sends next
        self._left: dict[int, tuple[str, float]] = {}  # shard -> why its server has left, and when this was heard

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
        self.sequence += 1
        kind = "push" if fetch else "push-only"
        self._selections = None
        if rows is not None:
            if self._settings is not None and self._by_workers_optimizer:
                check_rows(self._settings, rows)
            self._selections = [Selection(rows, *own, self.x.device) for own in self._ranges]
            payloads = list(gradient.split([one.count for one in self._selections]))
        else:
            payloads = self._push_codec.encode(gradient, self._settings.missing if self._settings is not None else ())
        return self._exchange(
            [
                Message(kind, self.sequence, num_samples, payload, version)
                for payload, version in zip(payloads, self._versions, strict=True)
            ]
        )

    def before_own_step(self, rows: Rows | None) -> None:
        """The worker is about to step on `x` by itself, with a gradient of these rows; None: on all of it."""
        if rows is None:
            self._has_own = True
        else:  # so that parameters that have come since can be written over those that came before
            selection = Selection(rows, 0, len(self.x), self.x.device)
            self._undo.append((selection, selection.take(self.x)))

    def fetch(self) -> None:
        """Waits for the newest parameters."""
        self._num_fetches += 1
        number = _FINAL - self._num_fetches
        self._exchange([Message("fetch", number, self._has(shard)) for shard in self._shards])

    def _has(self, shard: int) -> int:
        """The version of a shard's parameters that this worker has; -1: it has changed them by itself."""
        return -1 if self._has_own else self._versions[shard]

    def meet(self) -> None:
        """Announces that this worker waits at a meeting of all workers, so that servers do not make others wait for it."""
        self._num_fetches += 1
        self._request(dict.fromkeys(self._shards, Message("meet", _FINAL - self._num_fetches)))
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
        self._has_met = False
        self._clocks.clear()
        answers = self._request(dict(enumerate(messages)), in_order=in_order)
        while self._clocks and (behind := [one for one in self._shards if self._clocks.get(one, 0) < self.sequence]):
            # One shard has a later clock for this worker: the other shards' parameters lack updates that it promises.
            self._request(dict.fromkeys(behind, Message("join", self.sequence)))
        while self._aligned and (newest := max(self._versions)) != min(self._versions):
            # Some shards were a step behind: they had refused this worker's gradient before that step.
            self._num_fetches += 1
            number = _FINAL - self._num_fetches
            behind = [shard for shard in self._shards if self._versions[shard] < newest]
            self._request({one: Message("fetch", number, self._has(one), version=newest) for one in behind})
        if messages[0].kind != "push-only":
            self._has_own = False
        self.version = self._versions[0]
        return answers[0]

    def _request(self, requests: dict[int, Message], *, in_order: bool = False) -> dict[int, Answer]:
        """Sends each shard its request, all before waiting for any; returns the answers.

        Waiting for one particular shard ends if the run is being stopped. So the client waits for shards one by one with
        `in_order`, and for a shard whose server has left until a successor takes over.
        """
        # The first shard last: if it chooses whose gradients count, the others have this one by then.
        for shard in sorted(requests, reverse=True):
            self._send(shard, requests[shard])
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
                    self._clock_of_next.pop(shard, None)  # a successor counts from what it knows
                case PeerBack(peer=peer) if (shard := peer - self._first_server) in self._shards:
                    self._left.pop(shard, None)
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
        echo, server = self._echoes[shard], self._first_server + shard
        selection = self._selections[shard] if self._selections is not None else None
        with contextlib.suppress(PeerLostError):  # requests are sent again when the server is back
            if selection is not None and message.kind in _PUSHES:
                self._mailbox.send(server, Message("rows", message.number, self._has(shard), selection.to_bytes()))
            if echo is not None and message.kind in _PUSHES:
                echo = echo if selection is None else selection.take(echo)
                self._mailbox.send(server, Message("echo", message.number, x=echo))
            self._mailbox.send(server, message)

    def _hear(self, shard: int, received: Received, request: Message | None) -> Answer | None:
        """Handles a shard's message; returns its answer if it answers the request."""
        kind, number, _, _, version = received.message
        part = self.x[slice(*self._ranges[shard])]
        changed_at, changed = self._changed.get(shard, (0, None))
        changed = changed if changed_at == number else None
        if kind == "rows":
            self._changed[shard] = number, self._read_rows(received, shard)
        elif kind == "echo":
            echo, before = checked_vector(received, part, changed), self._echoes[shard]
            if changed is None:
                self._echoes[shard] = echo
            elif before is not None:
                changed.put(before, echo)
        elif kind == "clock":
            self._clock_of_next[shard] = checked_number(received, number)
        elif request is not None and number == request.number and kind in ("x", "ack"):  # else an answer given twice
            applied = checked_weight(received, least=-1)
            checked_number(received, version)
            x = checked_vector(received, part, changed) if kind == "x" else part
            clock = self._clock_of_next.pop(shard, 0)
            if kind == "x":
                self._write(part, x, changed)
                self._versions[shard] = version
                if clock or request.kind == "join":
                    self._clocks[shard] = max(clock, number)
                    self.sequence = max(self.sequence, clock)
            if request.kind in _PUSHES:
                self._push_codec.settle(shard, is_applied=applied != DROPPED)
            return Answer(applied, version)
        return None

    def _read_rows(self, received: Received, shard: int) -> Selection:
        try:
            assert received.message.x is not None
            return Selection.from_bytes(received.message.x.cpu(), *self._ranges[shard], self.x.device)
        except (AssertionError, ValueError) as error:
            raise MalformedMessageError(received.sender, received.message, f"with invalid rows ({error})") from None

    def _write(self, part: torch.Tensor, x: torch.Tensor, changed: Selection | None) -> None:
        """Writes a shard's parameters (n,) to its part of `x`; those that have changed, where only these have come."""
        while self._undo:
            selection, before = self._undo.pop()
            selection.put(self.x, before)
        if changed is None:
            part.copy_(x)
        else:
            changed.put(part, x)
        self._moved(2 * len(x) / max(1, len(self.x)) if changed is not None else 2 / len(self._ranges))
