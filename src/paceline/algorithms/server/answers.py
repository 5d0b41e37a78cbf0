"""The parameters that a shard sends to workers: all, or only what has changed since a worker last got them."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.optim.rows import Rows, Selection, Table
from paceline.ports.ports import Mailbox, Message, ServerPorts


class ChangedRows:
    """The version at which each row of a shard's tables has last changed.

    A parameter counts as a table once a gradient of it had rows; before that, and in all other gradients, all of it changes.
    Costs: 8 bytes per row.

    Args:
        begin: where the shard begins in the flat vector.
        end: the element after its last.
    """

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self._end = begin, end
        self._changed: dict[Table, tuple[int, Tensor]] = {}  # the shard's first row, and each row's version

    def note(self, selection: Selection | None, version: int) -> None:
        """An update of the selected elements has made this version."""
        rows: Rows = selection.rows if selection is not None else {}
        for table in rows.keys() - self._changed.keys():
            first = max(0, (self._begin - table.begin) // table.width)
            past = -((table.begin - min(self._end, table.end)) // table.width)
            self._changed[table] = first, torch.full((past - first,), version - 1)
        for table, (first, versions) in self._changed.items():
            if table in rows:
                versions[rows[table] - first] = version
            else:
                versions.fill_(version)

    def since(self, version: int) -> Selection | None:
        """What has changed after this version; None: it can be anything."""
        if not self._changed:
            return None
        rows = {
            table: (versions > version).nonzero().flatten() + first
            for table, (first, versions) in sorted(self._changed.items())
        }
        return Selection(rows, self._begin, self._end)


class Answers:
    """Sends workers a shard's parameters.

    A worker that had its last parameters from this process, and says so, gets what has changed since; all others, such as the
    workers of a dead server, get all.

    Args:
        ports: the server's, whose shared vector is sent.
        shard_id: its shard.
    """

    def __init__(self, ports: ServerPorts, shard_id: int) -> None:
        assert ports.mailbox is not None
        self._mailbox: Mailbox = ports.mailbox
        self._x: Tensor = ports.shared.x
        self._changed = ChangedRows(*ports.shared.ranges[shard_id])
        self._sent: dict[int, int] = {}  # worker -> version of the parameters that it was last sent
        self._has: dict[int, tuple[int, int]] = {}  # worker -> number of its request, and the version that it has

    def note(self, selection: Selection | None, version: int) -> None:
        """An update of the selected elements has made this version."""
        self._changed.note(selection, version)

    def hear(self, worker: int, message: Message) -> None:
        """Notes which version a worker has: its fetches say so, and the rows that precede a gradient; -1: none."""
        if message.kind in ("rows", "fetch"):
            self._has[worker] = message.number, int(message.weight)

    def forget(self, worker: int) -> None:
        """Another process takes the worker's place."""
        self._sent.pop(worker, None)
        self._has.pop(worker, None)

    def send(self, worker: int, number: int, applied_version: int, version: int, echo: Tensor | None) -> None:
        """Answers a request.

        Args:
            worker: who gets the parameters.
            number: of its request.
            applied_version: of its gradient.
            version: of the parameters.
            echo: a vector that goes with them; None: there is none.

        Raises:
            PeerLostError: the worker has left.
        """
        x, selection = self._x, None
        asked, has = self._has.pop(worker, (None, -1))
        if asked == number and has == self._sent.get(worker):
            selection = self._changed.since(has)
        if selection is not None and selection.count < len(x):
            self._mailbox.send(worker, Message("rows", number, x=selection.to_bytes()))
            x, echo = selection.take(x), None if echo is None else selection.take(echo)
        if echo is not None:
            self._mailbox.send(worker, Message("echo", number, x=echo))
        self._mailbox.send(worker, Message("x", number, applied_version, x, version))
        self._sent[worker] = version
