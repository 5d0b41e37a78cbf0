"""The queue of pending messages and events: the part of `Mailbox.receive` that all transports share."""

from __future__ import annotations

from collections import deque

from paceline.ports.ports import Event, Received


def fits(
    event: Event, kinds: tuple[str, ...] | None = None, sender: int | None = None, number: int | None = None
) -> bool:
    """Whether a `receive` with these filters ends with `event`.

    A message must agree with every filter that is not None. An event of a peer must agree with `sender` only: without it, any
    event fits.
    """
    if isinstance(event, Received):
        message = event.message
        return (
            (kinds is None or message.kind in kinds)
            and (sender is None or sender == event.sender)
            and (number is None or number == message.number)
        )
    return sender is None or sender == event.peer


class PendingEvents:
    """Messages and events of peers in order of arrival, taken out by filters.

    Costs: `add`, and `take` without filters, are constant; with filters, `take` scans up to the first that fits.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, event: Event) -> None:
        """Appends an event."""
        self._waiting.append(event)

    def take(
        self, kind: str | tuple[str, ...] | None = None, sender: int | None = None, number: int | None = None
    ) -> Event | None:
        """Removes and returns the oldest item that fits, or None."""
        waiting = self._waiting
        if kind is None and sender is None and number is None:
            return waiting.popleft() if waiting else None
        kinds = (kind,) if isinstance(kind, str) else kind
        for index, event in enumerate(waiting):
            if fits(event, kinds, sender, number):
                del waiting[index]
                return event
        return None
