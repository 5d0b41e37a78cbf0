"""What workers send before a gradient, or before they fetch some rows."""

from __future__ import annotations

from torch import Tensor

from paceline.optim.rows import Selection
from paceline.ports.checks import MalformedMessageError, checked_vector
from paceline.ports.ports import Received


class Announced:
    """What workers send before a gradient, with its number: the rows that it has, and an echo; or the rows that they fetch."""

    def __init__(self, x: Tensor, elements: tuple[int, int], *, takes_rows: bool) -> None:
        self._x, self._elements, self._takes_rows = x, elements, takes_rows
        self._selections: dict[int, tuple[int, Selection]] = {}  # by worker; with the gradient's number
        self._echoes: dict[int, Tensor] = {}

    def hear(self, received: Received) -> None:
        """Handles a message "rows", "lookup" or "echo".

        Raises:
            MalformedMessageError: it is invalid, or rows are not taken.
        """
        sender, _, message = received
        if message.kind == "echo":
            self._echoes[sender] = checked_vector(received, self._x, self.selection(sender, message.number))
            return
        try:
            if message.x is None or not self._takes_rows:
                raise ValueError("none are expected")
            self._selections[sender] = message.number, Selection.from_bytes(message.x, *self._elements)
        except ValueError as error:
            raise MalformedMessageError(sender, message, f"with invalid rows ({error})") from None

    def selection(self, worker: int, number: int) -> Selection | None:
        """The elements that a worker's gradient of this number has, or its fetch asks for; None: all."""
        found = self._selections.get(worker)
        return found[1] if found is not None and found[0] == number else None

    def finish(self, worker: int) -> Tensor | None:
        """A worker's gradient has arrived; returns its echo, if there is one."""
        self._selections.pop(worker, None)
        return self._echoes.pop(worker, None)

    def forget(self, worker: int) -> None:
        """Another process takes the worker's place."""
        self._selections.pop(worker, None)
        self._echoes.pop(worker, None)
