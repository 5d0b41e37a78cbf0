"""A worker's copy of the parameters that servers hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from paceline.optim.rows import Rows, Selection, nothing_but
from paceline.ports.checks import MalformedMessageError, checked_vector
from paceline.ports.lookups import Lookups
from paceline.ports.ports import Ports, Received
from paceline.system.pages import empty_pages, take_small_pages, untouched_zeros


class _Arriving(NamedTuple):
    """The messages that have come before an answer's parameters."""

    number: int  # of the request
    changed: Selection | None = None  # the elements that the answer has; None: all
    echo: torch.Tensor | None = None
    into: torch.Tensor | None = None  # the vector (P,) that looked-up rows are written to; None: it is not for a lookup


class _Lookup(NamedTuple):
    """Rows that are being fetched."""

    number: int  # of the request
    into: torch.Tensor  # the vector (P,) that they are written to
    selections: dict[int, Selection]  # of each shard that has some


class WorkerCopy:
    """A worker's copy of the parameters, which servers' answers and the worker's own steps change."""

    def __init__(self, ports: Ports[Any]) -> None:
        self.x: torch.Tensor = ports.shared.x  # the copy (P,)
        self._ranges, self._moved = ports.shared.ranges, ports.moved
        self.versions = [0] * len(self._ranges)  # of each shard's parameters in it
        # What came with each shard's parameters, to be sent back with the gradient; None: nothing.
        self.echoes: list[torch.Tensor | None] = [None] * len(self._ranges)
        self._arriving: dict[int, _Arriving] = {}  # by shard
        # What own steps have changed: elements, and their values before.
        self._rows_before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._has_changed_all = False  # whether own steps have changed all of it since it came
        # Tables whose rows are looked up have no other rows here.
        self.follows = False  # whether rows of some tables come, or have come, when they are looked up
        self._lookups: Lookups | None = None
        self._looked_up: Rows = {}  # these tables, without rows
        self._came_whole = False  # whether a shard has sent its part of them all the same
        self._lookup: _Lookup | None = None

    def follow(self, lookups: Lookups) -> None:
        """From now on, rows of these tables come only when they are looked up."""
        self._lookups, self._looked_up = lookups, dict.fromkeys(lookups.tables)
        self.follows = True

    def hold_whole(self) -> None:
        """All rows have come: from now on, tables come as the rest does, and the next time as a whole."""
        self._lookups, self._looked_up = None, {}
        self._has_changed_all = True

    def tables(self, shard: int) -> Selection:
        """The tables whose rows are looked up, as far as they lie in a shard."""
        return Selection(self._looked_up, *self._ranges[shard])

    def look_up(self, number: int, rows: Rows, into: torch.Tensor) -> dict[int, Selection]:
        """These rows are to be written `into` a vector (P,) once the request of this number is answered.

        Returns:
            what each shard that has some is asked for.
        """
        of_all = {shard: Selection(nothing_but(rows, *own), *own) for shard, own in enumerate(self._ranges)}
        selections = {shard: one for shard, one in of_all.items() if one.count}
        self._lookup = _Lookup(number, into, selections)
        return selections

    def selections(self, rows: Rows) -> list[Selection]:
        """What rows select of each shard."""
        return [Selection(rows, begin, end, self.x.device) for begin, end in self._ranges]

    def held(self, shard: int) -> int:
        """The version of a shard's parameters that the worker has; -1: it has changed them by itself."""
        return -1 if self._has_changed_all else self.versions[shard]

    def before_own_step(self, rows: Rows | None) -> None:
        """The worker is about to step on `x` by itself, with a gradient of these rows; None: on all of it."""
        if rows is None or self._has_changed_all:
            self._has_changed_all = True
            self._rows_before.clear()
        else:  # so that the rows that come next can be written over those that came before
            rows = {**rows, **self._looked_up}  # the former values of these come anew
            elements = Selection(dict(sorted(rows.items())), 0, len(self.x), self.x.device).row_elements()
            self._rows_before.append((elements, self.x.index_select(0, elements)))
            self._moved(2 * len(elements) / len(self.x))

    def all_came(self) -> None:
        """All shards have answered with parameters."""
        self._has_changed_all = False
        if self._lookups is not None:
            self._lookups.outdate(self.x, is_whole=self._came_whole)
            self._came_whole = False
            for shard, echo in enumerate(self.echoes):
                if echo is not None:
                    for part, _ in self.tables(shard).table_parts():
                        empty_pages(echo[part])

    def hear(self, shard: int, received: Received) -> None:
        """Handles what a shard sends before its parameters: which of them have changed, and an echo."""
        message = received.message
        before = self._before(shard, message.number)
        if message.kind == "echo":
            echo = checked_vector(received, self._part(shard), before.changed)
            self._arriving[shard] = before._replace(echo=echo)
            return
        try:
            assert message.x is not None
            begin, end = self._ranges[shard]
            changed = Selection.from_bytes(message.x.cpu(), begin, end, self.x.device)
        except (AssertionError, ValueError) as error:
            raise MalformedMessageError(received.sender, message, f"with invalid rows ({error})") from None
        self._arriving[shard] = before._replace(changed=changed)

    def forget(self, shard: int) -> None:
        """A shard's server has left in the middle of an answer, perhaps."""
        self._arriving.pop(shard, None)

    def take(self, shard: int, received: Received) -> None:
        """Writes a shard's parameters, and keeps their echo.

        Raises:
            MalformedMessageError: they are invalid; a repeated answer can have all parameters.
        """
        part, message = self._part(shard), received.message
        _, changed, echo, into = self._before(shard, message.number)
        try:
            x = checked_vector(received, part, changed)
        except MalformedMessageError:
            if changed is not None:
                self.forget(shard)
            raise
        self.forget(shard)
        if into is not None:
            assert changed is not None
            changed.put(into[slice(*self._ranges[shard])], x)
            self._moved(2 * len(x) / len(self.x))
            if echo is not None and into is self.x:
                self._put_echo(shard, changed, echo)
            return
        while self._rows_before:
            elements, before = self._rows_before.pop()
            self.x.index_copy_(0, elements, before)
        self.versions[shard] = message.version
        if changed is None:
            part.copy_(x)
            self.echoes[shard] = echo
            self._came_whole = True
            self._moved(2 / len(self._ranges))
            return
        changed.put(part, x)
        self._moved(2 * len(x) / len(self.x))
        if echo is not None:
            self._put_echo(shard, changed, echo)

    def _put_echo(self, shard: int, changed: Selection, echo: torch.Tensor) -> None:
        whole = self.echoes[shard]
        if whole is None and self._looked_up:
            whole = self.echoes[shard] = untouched_zeros(len(self._part(shard)), echo.dtype)
            take_small_pages(whole)
        if whole is not None:
            changed.put(whole, echo)

    def _part(self, shard: int) -> torch.Tensor:
        return self.x[slice(*self._ranges[shard])]

    def _before(self, shard: int, number: int) -> _Arriving:
        """The messages that have come before the answer to this request."""
        found, lookup = self._arriving.get(shard), self._lookup
        if found is not None and found.number == number:
            return found
        if lookup is not None and lookup.number == number:
            return _Arriving(number, lookup.selections[shard], into=lookup.into)
        return _Arriving(number)
