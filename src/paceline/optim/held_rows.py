"""The rows of tables that a vector has, while all other rows take no memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from paceline.optim.rows import Rows, Table
from paceline.system.pages import empty_pages, take_small_pages

_MOST_SHARE = 25  # memory is given back once a 25th of a table may be in it


class HeldRows:
    """Some rows of tables in a flat vector `x` (P,), whose tables become zero; all others take no memory.

    Costs at most a 25th of the tables' memory besides the rows held at a time, each with a page of 4 KB.
    """

    def __init__(self, x: torch.Tensor, tables: Sequence[Table]) -> None:
        self.x = x
        self._held: Rows = {}
        self._written_bytes = dict.fromkeys(tables, 0)  # at most, with their pages
        for table in tables:
            take_small_pages(x[table.begin : table.end])
        self.forget(is_whole=True)

    def missing(self, table: Table, numbers: torch.Tensor) -> torch.Tensor:
        """Of these rows (m,), those that the vector does not have, ascending; rows outside the table are left out."""
        numbers = numbers[(numbers >= 0) & (numbers < (table.end - table.begin) // table.width)].unique()
        held = self._held.get(table)
        return numbers if held is None else numbers[torch.isin(numbers, held, assume_unique=True, invert=True)]

    def add(self, table: Table, numbers: torch.Tensor) -> None:
        """These rows (m,) have been written, which the vector did not have."""
        held = self._held.get(table)
        self._held[table] = numbers if held is None else torch.cat([held, numbers])
        self._written_bytes[table] += len(numbers) * (table.width * self.x.element_size() + mmap.PAGESIZE)

    def forget(self, *, is_whole: bool = False) -> None:
        """Forgets all rows; `is_whole`: any have been written since the last time."""
        self._held.clear()
        for table, written in self._written_bytes.items():
            part = self.x[table.begin : table.end]
            if is_whole or written > part.nbytes // _MOST_SHARE:
                empty_pages(part)
                self._written_bytes[table] = 0
