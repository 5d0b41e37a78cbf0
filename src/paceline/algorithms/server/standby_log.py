"""A shard's second copy: how it follows its server, and why no update is lost or made twice when either of them dies.

Only the server decides. It sends its decisions to the copy as an ordered log: whose gradients make an update, with their mean;
what was dropped; which workers joined and left; what was read, for AdaptiveRevision. The copy makes the same updates by the
same rule, so both contain the same updates; their floats are equal bit for bit if both run the same kernels.

1. The server sends an answer, or a choice for other shards, only after the copy has confirmed all earlier entries. So a worker
   has only ever seen what both have.
2. A worker resends unanswered messages. If the copy has that update, and with it the worker's last number, it is a
   duplicate, and answered. If not, no worker has seen it, and the copy decides again. For the same reason the log omits
   requests and gradients that wait for others.
3. The log is numbered without gaps. After a gap (a broken connection) or a malformed entry the copy confirms nothing until it
   has requested and received the whole state. So the confirmed entries are a prefix.
4. A word that outlives both processes names the copy that has everything ever answered; only the server writes it. The server
   clears it before it answers anything without the copy, and sets it once a copy has the state and all later entries.
5. Only the supervisor lets a copy take over, after it has seen the server's process end and finds the copy in that word. A
   silent server is never replaced, so there are never two. If the word names no living copy, both are lost, and the run ends.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from paceline.algorithms.server.update import UpdateInfo, WaitingGradient
from paceline.errors import PeerLostError
from paceline.ports.ports import Mailbox, Message, PeerBack, PeerLeft, Received, ServerPorts

_HAS = "copy-has"  # what the copy confirms; -1: that it needs the whole state
_STATE, _PART = "copy-state", "copy-part"  # `version` counts the parts that follow
_UNFINISHED = frozenset(("copy-ones", "copy-rows", "copy-echo"))  # a mean follows
_LOOK_EVERY_S = 0.05  # at whether to take over
_LOOK_SOON_S = 0.002  # the same, once the server is silent


class CopyLink:
    """The server's side: writes the log and tracks what the copy has confirmed."""

    def __init__(self, ports: ServerPorts, shard_id: int, state: Callable[[], dict[str, Any]]) -> None:
        assert ports.mailbox is not None
        self._mailbox = ports.mailbox
        self._peer = ports.num_workers + ports.num_servers + shard_id
        self._shared = ports.shared
        self._state = state
        self._logged = 0  # messages sent
        self._confirmed = 0  # messages that the copy has confirmed
        self._state_until = -1  # number of the last message of the newest state sent
        self._incarnation = 0
        self._here = self._follows = self._named = False

    def begin(self, deadline_s: float) -> None:
        """Waits until the copy has the state; continues without it after `deadline_s`."""
        came = self._peer in self._mailbox.peers()  # asked first: an event about it is queued by now
        while (event := self._mailbox.receive(0.0, sender=self._peer)) is not None:
            self.hear(event)
        if came and not self._here:
            self._send_state()
        while not self._named and (event := self._mailbox.receive(deadline_s, sender=self._peer)) is not None:
            self.hear(event)

    def is_about(self, event: Received | PeerLeft | PeerBack | None) -> bool:
        """Whether the event is about the copy, and so for `hear`."""
        return event is not None and (event.sender if isinstance(event, Received) else event.peer) == self._peer

    def hear(self, event: Received | PeerLeft | PeerBack | None) -> None:
        match event:
            case Received(message=Message(kind=kind, number=number)) if (
                kind != _HAS or not -1 <= number <= self._logged
            ):
                self._shared.count("malformed")
            case Received(message=Message(number=-1)):
                self._lose()
                self._send_state()
            case Received(incarnation=incarnation, message=Message(number=number)):
                self._confirmed = max(self._confirmed, number)
                if not self._here:  # it was unresponsive for too long and is back
                    self._send_state()
                elif not self._follows and number >= self._state_until:
                    self._follows, self._incarnation = True, incarnation
                    self.commit()
            case PeerLeft():
                self._lose()
            case PeerBack():
                self._lose()
                self._send_state()
            case _:
                pass

    def log(self, kind: str, x: torch.Tensor | None = None, *, about: int = 0, weight: float = 0.0) -> None:
        """Sends the copy one entry; `about` is a worker's id."""
        if self._here:
            self._logged += 1
            try:
                self._mailbox.send(self._peer, Message(kind, self._logged, weight, x, about))
            except PeerLostError:
                self._lose()

    def log_update(self, ones: list[WaitingGradient], update: UpdateInfo, mean: torch.Tensor) -> None:
        """Sends the copy an update to repeat: the mean (P_s,) of these gradients."""
        numbers = [(one.update.worker_id, one.incarnation, one.update.sequence) for one in ones]
        about = [update.step, update.version_read, update.num_samples, len(update.missing)]
        self.log("copy-ones", torch.tensor([*about, *chain(*update.missing, *numbers)]))
        if update.selection is not None:
            self.log("copy-rows", update.selection.to_bytes())
        if update.echo is not None:
            self.log("copy-echo", update.echo)
        self.log("copy-mean", mean)

    def commit(self) -> None:
        """Waits until the copy has confirmed all entries, or is gone; then the server may answer."""
        while self._follows and self._confirmed < self._logged:
            self.hear(self._mailbox.receive(sender=self._peer))
        if self._follows and not self._named:
            self._named = True
            self._shared.name_copy(self._incarnation)

    def _lose(self) -> None:
        self._here = self._follows = self._named = False
        self._shared.name_copy(None)

    def _send_state(self) -> None:
        self._here = True
        for message in state_messages(self._state()):
            self.log(message.kind, message.x, about=message.version)
        self._state_until = self._logged


class Log:
    """The copy's side: iterates over the log's entries, each a list of messages; confirms each when asked for the next."""

    def __init__(self, ports: ServerPorts, shard_id: int) -> None:
        assert ports.mailbox is not None
        self._mailbox: Mailbox = ports.mailbox
        self._server = ports.num_workers + shard_id
        self._promoted = ports.promoted
        self.ports: ServerPorts | None = None  # the server's, once the copy takes over; None if the server has ended
        self._is_lost = False

    def __iter__(self) -> Iterator[list[Message]]:
        last: int | None = None  # None: something is missing
        entry: list[Message] = []
        silent = False
        while True:
            if self._promoted is not None and (ports := self._promoted()) is not None:
                self.ports = ports
                return
            look_s = None if self._promoted is None else _LOOK_SOON_S if silent else _LOOK_EVERY_S
            match self._mailbox.receive(look_s, sender=self._server):
                case Received(message=message):
                    if message.kind == _STATE:
                        last, entry = message.number - 1, []
                    if last is None or message.number <= last or not message.kind.startswith("copy-"):
                        continue
                    if message.number > last + 1:
                        last = self._ask_again()
                        continue
                    last = message.number
                    entry.append(message)
                    if message.kind not in _UNFINISHED and not (message.kind in (_STATE, _PART) and message.version):
                        yield entry
                        entry = []
                        last = self._ask_again() if self._is_lost else self._confirm(last)
                case PeerLeft(reason="ended"):
                    return
                case PeerLeft():
                    silent, last = True, None
                case PeerBack():
                    silent = False
                case _:
                    pass

    def begin_anew(self) -> None:
        """Rejects the last entry and requests the whole state."""
        self._is_lost = True

    def _ask_again(self) -> None:
        self._is_lost = False
        self._confirm(-1)

    def _confirm(self, number: int) -> int:
        with contextlib.suppress(PeerLostError):  # its event is on its way
            self._mailbox.send(self._server, Message(_HAS, number))
        return number


def state_messages(state: dict[str, Any]) -> list[Message]:
    """Nested dictionaries and lists of numbers, strings and tensors, as messages; `version` counts those that follow."""
    tensors: list[torch.Tensor] = []

    def plain(value: Any) -> Any:
        match value:
            case torch.Tensor():
                tensors.append(value.detach().reshape(-1))
                return {"shape": list(value.shape)}
            case dict():
                return {"pairs": [[key, plain(one)] for key, one in value.items()]}
            case list() | tuple():
                return [plain(one) for one in value]
            case _:
                return value

    about = torch.frombuffer(bytearray(json.dumps(plain(state)).encode()), dtype=torch.uint8)
    parts = [Message(_PART, x=x, version=len(tensors) - place - 1) for place, x in enumerate(tensors)]
    return [Message(_STATE, x=about, version=len(tensors)), *parts]


def state_from(messages: list[Message]) -> dict[str, Any]:
    """The inverse of `state_messages`; tuples become lists.

    >>> state_from(state_messages({"known": {3: (0, 7)}, "x": torch.ones(2, 1)}))
    {'known': {3: [0, 7]}, 'x': tensor([[1.],
            [1.]])}
    """
    first, *parts = messages
    tensors = iter([message.x for message in parts])

    def rich(value: Any) -> Any:
        if isinstance(value, list):
            return [rich(one) for one in value]
        if isinstance(value, dict) and "pairs" in value:
            return {key: rich(one) for key, one in value["pairs"]}
        if isinstance(value, dict):
            x = next(tensors)
            assert x is not None
            return x.reshape(value["shape"])
        return value

    assert first.x is not None
    return rich(json.loads(bytes(first.x.tolist())))
