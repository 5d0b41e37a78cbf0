"""Tables whose rows a worker gets from servers when its model looks them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from paceline.optim.rows import Rows, Table


class Lookups(Protocol):
    """A loop's large tables, of which a program can bring single rows."""

    @property
    def tables(self) -> Sequence[Table]:
        """The tables, in ascending order; none once they are whole."""
        ...

    def begin(
        self, x: torch.Tensor, fetch: Callable[[Rows, torch.Tensor], None], hold_whole: Callable[[], None]
    ) -> None:
        """From now on, vectors have only the rows that the model looks up; call before the first gradient.

        Args:
            x: the vector (P,) of gradients.
            fetch: writes the newest values of some rows to a vector (P,).
            hold_whole: called once if the loop uses a table in another way, after all other rows have been fetched: from then
                on the program brings whole tables.
        """

    def outdate(self, x: torch.Tensor, *, is_whole: bool = False) -> None:
        """Forgets the rows that a vector (P,) has, as there may be newer ones; `is_whole`: all rows have been written."""
