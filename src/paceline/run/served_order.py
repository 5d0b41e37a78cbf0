"""Lets simulated servers receive messages in the order of a recorded run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.ports.ports import Event, Message, Received
from paceline.records.order import Exchange, Process
from paceline.simulator.mailbox import SimulatedMailbox


class OrderedMailbox(SimulatedMailbox):
    """A server's mailbox, which hands out messages in the order in which its shard received them in a recorded run.

    A gradient comes when the shard has the version before its update and has sent all answers that it sent at that version.
    Any other request comes at the version with which it was answered.

    Args:
        shard: that the server writes.
        exchanges: with this shard, by process of a worker.
        waits: whether workers wait for each other. A goodbye then comes when nothing else can: it lets the shard answer those
            that wait for the worker that left.
    """

    def __init__(
        self, *args: Any, shard: Any, exchanges: Mapping[Process, Sequence[Exchange]], waits: bool, **named: Any
    ) -> None:
        super().__init__(*args, **named)
        self._shard, self._waits = shard, waits
        self._exchanges = {process: list(reversed(own)) for process, own in exchanges.items()}
        every = [one for own in exchanges.values() for one in own]
        self._unanswered = Counter(one.at for one in every if one.at is not None)  # by version
        self._to_come = Counter(one.of for one in every if one.of)  # gradients, by update
        self._asking: dict[int, int | None] = {}  # worker -> version at which it will be answered

    def send(self, to: int, message: Message) -> None:
        super().send(to, message)
        at = self._asking.pop(to, None) if message.kind in ("x", "ack") else None
        if at is not None:
            self._unanswered[at] -= 1

    def receive(self, timeout_s: float | None = None, **which: Any) -> Event | None:
        """As `Mailbox.receive`; without a choice it waits for the message whose turn it is, however long that takes."""
        if which:
            return super().receive(timeout_s, **which)
        while (place := self._pick(self._items, self._shard.version)) is None:
            kept, self._items = self._items, []
            event = super().receive()
            assert event is not None
            self._items = [*kept, event, *self._items]
        return self._items.pop(place)

    def _pick(self, events: Sequence[Event], version: int) -> int | None:
        """The place of the event that a shard with this version receives next; None: it has not come yet."""
        seen: set[int] = set()
        goodbye = None
        for place, event in enumerate(events):
            sender = event.sender if isinstance(event, Received) else event.peer
            if sender in seen:
                continue
            seen.add(sender)
            if self._waits and _is_goodbye(event):
                if self._returns(events[place + 1 :], sender, version):
                    return place
                goodbye = place if goodbye is None else goodbye
            elif not isinstance(event, Received) or not _is_ordered(event.message) or self._is_next(event, version):
                return place
        return goodbye if goodbye is not None and self._is_stuck(version) else None

    def _returns(self, later: Sequence[Event], worker: int, version: int) -> bool:
        """Whether the worker has been replaced, and it is the new process's turn to join."""
        for one in later:
            if isinstance(one, Received) and one.sender == worker and one.message.kind == "join":
                own = self._exchanges.get((worker, one.incarnation))
                return not own or own[-1].at in (None, version)
        return False

    def _is_next(self, event: Received, version: int) -> bool:
        own = self._exchanges.get((event.sender, event.incarnation))
        at, of = own[-1] if own else (None, 0)
        if (of != version + 1 or self._unanswered[version] > 0) if of else at not in (None, version):
            return False
        if own:
            own.pop()
        self._asking[event.sender] = at
        if of:
            self._to_come[of] -= 1
        return True

    def _is_stuck(self, version: int) -> bool:
        """Whether the shard waits for a worker that has left, or makes no further update."""
        waits = version in self._asking.values()
        has_all = self._to_come.get(version + 1, 0) <= 0
        return waits or (has_all and self._unanswered[version] <= 0)


def _is_goodbye(event: Event) -> bool:
    return not isinstance(event, Received) or event.message.kind == "bye"


def _is_ordered(message: Message) -> bool:
    """Whether the records have it: a gradient, a request for parameters; not a question about another shard's version."""
    return message.kind in ("push", "push-only") or (
        (message.kind == "fetch" and not message.version) or (message.kind == "join" and not message.number)
    )
