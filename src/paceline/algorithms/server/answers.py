"""The parameters that a shard sends to workers: all, what has changed since a worker last got them, or some rows."""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from torch import Tensor

from paceline.algorithms.server.announced import Announced
from paceline.algorithms.server.requests import END
from paceline.optim.rows import Rows, Selection, union
from paceline.ports.checks import MalformedMessageError
from paceline.ports.ports import Mailbox, Message, Received, ServerPorts

_MOST_UPDATES = 10_000


class ChangedRows:
    """The rows that the last updates of a shard have changed.

    Forgets the oldest updates once they have changed more rows than the tables have: all of it is then the shorter answer.
    Keeps 10,000 at most.
    """

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self._end = begin, end
        self._updates: deque[tuple[int, Rows]] = deque()  # each one's version
        self._num_rows = 0  # of all these
        self._known_from = 0  # the version after which all changes are known
        self._tables: Rows = {}  # of the last update, without its rows

    def note(self, selection: Selection | None, version: int) -> None:
        """An update of the selected elements, or of all, has made this version."""
        if selection is None:
            self._updates.clear()
            self._num_rows, self._known_from = 0, version
            return
        self._updates.append((version, selection.rows))
        self._tables = dict.fromkeys(selection.rows)
        self._num_rows += _count(selection.rows)
        most = sum((table.end - table.begin) // table.width for table in self._tables)
        while self._num_rows > most or len(self._updates) > _MOST_UPDATES:
            self._known_from, oldest = self._updates.popleft()
            self._num_rows -= _count(oldest)

    def since(self, version: int) -> Selection | None:
        """The elements that have changed after this version; None: not known."""
        if version < self._known_from:
            return None
        after = [rows for _, rows in takewhile(lambda update: update[0] > version, reversed(self._updates))]
        rows = union(after, self._begin, self._end) if after else self._tables
        return Selection(rows, self._begin, self._end)


def _count(rows: Rows) -> int:
    return sum(len(numbers) for numbers in rows.values() if numbers is not None)


class Answers:
    """Sends workers a shard's parameters.

    A worker that says that its last parameters came from this process gets the elements that have changed since. All others,
    such as the workers of a dead server, get all elements. Tables whose rows a worker looks up are left out, and their rows
    are sent on request.
    """

    def __init__(self, ports: ServerPorts, shard_id: int, announced: Announced) -> None:
        assert ports.mailbox is not None
        self._mailbox: Mailbox = ports.mailbox
        self._x: Tensor = ports.shared.x
        self._range = ports.shared.ranges[shard_id]
        self._changed = ChangedRows(*self._range)
        self._announced = announced  # the rows that workers look up
        self._tables: dict[int, Rows] = {}  # worker -> the tables that it looks up, without rows
        self._sent: dict[int, int] = {}  # worker -> version of the parameters that it was last sent
        self._has: dict[int, tuple[int, int]] = {}  # worker -> number of its request, and the version that it has

    def note(self, selection: Selection | None, version: int) -> None:
        self._changed.note(selection, version)

    def hear(self, received: Received) -> None:
        """Notes a worker's tables, and the version that it says it has, in a fetch or before a gradient; -1: none."""
        worker, _, message = received
        if message.kind in ("rows", "fetch"):
            self._has[worker] = message.number, int(message.weight)
        elif message.kind == "tables":
            try:
                if message.x is None:
                    raise ValueError("none")
                self._tables[worker] = dict.fromkeys(Selection.from_bytes(message.x, *self._range).rows)
            except ValueError as error:
                raise MalformedMessageError(worker, message, f"with invalid tables ({error})") from None

    def forget(self, worker: int) -> None:
        self._sent.pop(worker, None)
        self._has.pop(worker, None)

    def send(self, worker: int, number: int, applied_version: int, version: int, echo: Tensor | None) -> bool:
        """Answers a request; returns whether it was for parameters, and not for the rows of a lookup.

        Args:
            worker: who gets the parameters.
            number: of its request.
            applied_version: of its gradient.
            version: of the parameters.
            echo: a vector that goes with them; None: there is none.

        Raises:
            PeerLostError: the worker has left.
        """
        x = self._x
        wanted = self._announced.selection(worker, number) if number < 0 else None
        selection = wanted
        asked, has = self._has.pop(worker, (None, -1))
        if asked == number and has == self._sent.get(worker):
            selection = self._changed.since(has)
        if wanted is None and number != END and (tables := self._tables.get(worker)):
            rows = {} if selection is None else selection.rows
            begins = {one.begin for one in tables}
            rows = tables | {one: numbers for one, numbers in rows.items() if one.begin not in begins}
            selection = Selection(dict(sorted(rows.items())), *self._range)
        if selection is not None and selection.count < len(x):
            if wanted is None:
                self._mailbox.send(worker, Message("rows", number, x=selection.to_bytes()))
            x, echo = selection.take(x), None if echo is None else selection.take(echo)
        if echo is not None:
            self._mailbox.send(worker, Message("echo", number, x=echo))
        self._mailbox.send(worker, Message("x", number, applied_version, x, version))
        if wanted is None:
            self._sent[worker] = version
        return wanted is None
