"""A worker's copy of the parameters that servers hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from paceline.optim.rows import Rows, Selection
from paceline.ports.checks import MalformedMessageError, checked_vector
from paceline.ports.ports import Ports, Received


class _Arriving(NamedTuple):
    """The messages that have come before an answer's parameters."""

    number: int  # of the request
    changed: Selection | None = None  # the elements that the answer has; None: all
    echo: torch.Tensor | None = None


class WorkerCopy:
    """A worker's copy of the parameters, which servers' answers and the worker's own steps change.

    Args:
        ports: the worker's; `ports.shared.x` (P,) is the copy.

    Attributes:
        x: the copy (P,).
        versions: of each shard's parameters in it.
        echoes: what came with each shard's parameters, to be sent back with the gradient; None: nothing.
    """

    def __init__(self, ports: Ports[Any]) -> None:
        self.x: torch.Tensor = ports.shared.x
        self._ranges, self._moved = ports.shared.ranges, ports.moved
        self.versions = [0] * len(self._ranges)
        self.echoes: list[torch.Tensor | None] = [None] * len(self._ranges)
        self._arriving: dict[int, _Arriving] = {}  # by shard
        # What own steps have changed: elements, and their values before.
        self._rows_before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._has_changed_all = False  # whether own steps have changed all of it since it came

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
            elements = Selection(rows, 0, len(self.x), self.x.device).row_elements()
            self._rows_before.append((elements, self.x.index_select(0, elements)))
            self._moved(2 * len(elements) / len(self.x))

    def all_came(self) -> None:
        """All shards have answered with parameters."""
        self._has_changed_all = False

    def hear(self, shard: int, received: Received) -> None:
        """Handles what a shard sends before its parameters: which of them have changed, and an echo.

        Raises:
            MalformedMessageError: it is invalid.
        """
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
        _, changed, echo = self._before(shard, message.number)
        try:
            x = checked_vector(received, part, changed)
        except MalformedMessageError:
            if changed is not None:
                self.forget(shard)
            raise
        self.forget(shard)
        while self._rows_before:
            elements, before = self._rows_before.pop()
            self.x.index_copy_(0, elements, before)
        self.versions[shard] = message.version
        if changed is None:
            part.copy_(x)
            self.echoes[shard] = echo
            self._moved(2 / len(self._ranges))
            return
        changed.put(part, x)
        self._moved(2 * len(x) / len(self.x))
        if (whole := self.echoes[shard]) is not None and echo is not None:
            changed.put(whole, echo)

    def _part(self, shard: int) -> torch.Tensor:
        return self.x[slice(*self._ranges[shard])]

    def _before(self, shard: int, number: int) -> _Arriving:
        """The messages that have come before the answer to this request."""
        found = self._arriving.get(shard)
        return found if found is not None and found.number == number else _Arriving(number)
