"""What has come and was not asked for yet: the part of `Mailbox.receive` that no transport needs to write again."""

from __future__ import annotations

from collections import deque

from paceline.ports.ports import PeerBack, PeerLeft, Received

__all__ = ["Arrival", "Arrivals", "fits"]

Arrival = Received | PeerLeft | PeerBack
Kinds = str | tuple[str, ...] | None


def fits(arrival: Arrival, kind: Kinds = None, sender: int | None = None, number: int | None = None) -> bool:
    """Whether a `receive` with these filters ends with `arrival`.

    A message must agree with every filter that is not None. An event of a peer must agree with `sender` only: without it, any
    event fits.
    """
    if isinstance(arrival, Received):
        message = arrival.message
        return (
            (kind is None or (message.kind == kind if isinstance(kind, str) else message.kind in kind))
            and (sender is None or sender == arrival.sender)
            and (number is None or number == message.number)
        )
    return sender is None or sender == arrival.peer


class Arrivals:
    """Messages and events of peers in the order in which they came, taken out by filters.

    Costs: `add`, and `take` without filters, are constant; with filters, `take` looks at what came before the one that fits.
    Not safe to use from two threads at once.
    """

    def __init__(self) -> None:
        self._waiting: deque[Arrival] = deque()

    def __len__(self) -> int:
        """How many wait to be taken."""
        return len(self._waiting)

    def add(self, arrival: Arrival) -> None:
        """Keeps one more, as the newest."""
        self._waiting.append(arrival)

    def take(self, kind: Kinds = None, sender: int | None = None, number: int | None = None) -> Arrival | None:
        """Removes and returns the oldest that fits; None: there is none."""
        waiting = self._waiting
        if kind is None and sender is None and number is None:
            return waiting.popleft() if waiting else None
        for index, arrival in enumerate(waiting):
            if fits(arrival, kind, sender, number):
                del waiting[index]
                return arrival
        return None
