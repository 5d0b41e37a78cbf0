"""Rows of tables in the flat vector: what gradients of embeddings with `sparse=True` consist of."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

_COUNT = struct.Struct("<q")
_TABLE = struct.Struct("<4q")


class Table(NamedTuple):
    """A parameter as rows of the flat vector."""

    begin: int  # its first element
    end: int  # the one after its last
    width: int  # elements of a row


#: Of some tables, by ascending position: the numbers of rows (n,), int64, ascending, or None: this parameter has no gradient.
#: All else of the vector counts as whole.
Rows = dict[Table, torch.Tensor | None]


class Selection:
    """The elements of a part of the flat vector that some rows select: those of the rows, and all outside their tables.

    In ascending order. A row that lies in two parts belongs to both.

    Args:
        rows: of tables that need not lie in this part.
        begin: where the part begins in the flat vector.
        end: the element after its last.
        device: of the vectors.
    """

    def __init__(self, rows: Rows, begin: int, end: int, device: torch.device | str = "cpu") -> None:
        self.begin, self.end, self.device = begin, end, device
        self.rows: Rows = {}  # those with elements here
        self._places: list[tuple[int, slice | torch.Tensor]] = []  # where each stretch or table begins; its elements
        at = begin
        for table, numbers in rows.items():
            first, last = max(table.begin, begin), min(table.end, end)
            if first >= last:
                continue
            if numbers is not None and (first, last) != table[:2]:
                lowest, past = (first - table.begin) // table.width, -((table.begin - last) // table.width)
                numbers = numbers[(numbers >= lowest) & (numbers < past)]
            self.rows[table] = numbers
            if at < first:
                self._places.append((at, slice(at - begin, first - begin)))
            elements = (
                torch.empty(0, dtype=torch.int64) if numbers is None else self._elements(table, numbers.to(device))
            )
            self._places.append((first, elements.to(device)))
            at = last
        if at < end:
            self._places.append((at, slice(at - begin, end - begin)))
        self._lengths = [one.stop - one.start if isinstance(one, slice) else one.numel() for _, one in self._places]
        self.count = sum(self._lengths)  # how many elements are selected

    def _elements(self, table: Table, numbers: torch.Tensor) -> torch.Tensor:
        own = torch.arange(table.width, device=numbers.device)
        elements = (numbers.unsqueeze(1) * table.width + (table.begin - self.begin) + own).flatten()
        if table.begin >= self.begin and table.end <= self.end:
            return elements
        return elements[(elements >= 0) & (elements < self.end - self.begin)]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The selected elements (count,) of the part `x` (n,), as a copy."""
        return torch.cat([x[one] if isinstance(one, slice) else x.index_select(0, one) for _, one in self._places])

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Writes `values` (count,) to the selected elements of `x` (n,)."""
        for (_, one), part in zip(self._places, values.split(self._lengths), strict=True):
            if isinstance(one, slice):
                x[one] = part
            else:
                x.index_copy_(0, one, part)

    def spread(self, values: torch.Tensor, into: Selection, out: torch.Tensor) -> None:
        """Copies `values` (count,) to their places in `out` (into.count,).

        `into` selects at least these elements. Both selections have rows of the same tables, which lie in this part.
        """
        targets = zip(self._places, values.split(self._lengths), out.split(into._lengths), strict=True)
        tables = iter(self.rows.items())
        for (_, one), part, target in targets:
            if isinstance(one, slice):
                target.copy_(part)
                continue
            table, numbers = next(tables)
            others = into.rows[table]
            if numbers is not None and others is not None:
                places = torch.searchsorted(others.to(self.device), numbers.to(self.device))
                target.view(-1, table.width).index_copy_(0, places, part.view(-1, table.width).to(out.dtype))

    def row_means(self, values: torch.Tensor) -> torch.Tensor:
        """`values` (count,) with each element of a row replaced by the mean over the row's elements in this part."""
        means = values.clone()
        tables = {max(table.begin, self.begin): table for table in self.rows}
        for (at, one), part in zip(self._places, means.split(self._lengths), strict=True):
            if isinstance(one, slice) or not part.numel():
                continue
            table = tables[at]
            row = (one + (self.begin - table.begin)) // table.width
            _, number, length = torch.unique_consecutive(row, return_inverse=True, return_counts=True)
            sums = part.new_zeros(len(length)).index_add_(0, number, part)
            part.copy_((sums / length)[number])
        return means

    def row_elements(self) -> torch.Tensor:
        """The positions of the rows' elements (m,) in the part, without the whole stretches."""
        own = [one for _, one in self._places if not isinstance(one, slice)]
        return torch.cat(own) if own else torch.empty(0, dtype=torch.int64, device=self.device)

    def table_parts(self) -> list[tuple[slice, bool]]:
        """Each table's elements of the part, and whether it has a gradient."""
        return [
            (
                slice(max(table.begin, self.begin) - self.begin, min(table.end, self.end) - self.begin),
                numbers is not None,
            )
            for table, numbers in self.rows.items()
        ]

    def index(self) -> torch.Tensor:
        """The selected elements' positions (count,) in the part."""
        whole = [
            torch.arange(one.start, one.stop, device=self.device) for _, one in self._places if isinstance(one, slice)
        ]
        return torch.cat([whole.pop(0) if isinstance(one, slice) else one for _, one in self._places])

    def each(self, values: torch.Tensor) -> list[tuple[slice, torch.Tensor | None, torch.Tensor]]:
        """Each whole stretch of the part, and each table with a gradient: its elements, those selected, and their values.

        The second are positions in the table (m,); None: all of a stretch.
        """
        ends = [at for at, _ in self._places[1:]] + [self.end]
        without = {where.start for where, has_gradient in self.table_parts() if not has_gradient}
        found = []
        for (at, one), end, part in zip(self._places, ends, values.split(self._lengths), strict=True):
            where = slice(at - self.begin, end - self.begin)
            if isinstance(one, slice) or where.start not in without:
                found.append((where, None if isinstance(one, slice) else one - where.start, part))
        return found

    def to_bytes(self) -> torch.Tensor:
        """The rows, as bytes; 4 for each row."""
        counts = [-1 if one is None else len(one) for one in self.rows.values()]
        head = b"".join(
            [_COUNT.pack(len(counts)), *(_TABLE.pack(*t, n) for t, n in zip(self.rows, counts, strict=True))]
        )
        numbers = [one.to("cpu", torch.int32) for one in self.rows.values() if one is not None]
        both = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
        if numbers:  # a single number may have any stride, also as its own contiguous copy
            both.append(torch.cat(numbers).view(torch.uint8))
        return torch.cat(both)

    @classmethod
    def from_bytes(cls, sent: torch.Tensor, begin: int, end: int, device: torch.device | str = "cpu") -> Selection:
        """The inverse of `to_bytes`, for the same part.

        Raises:
            ValueError: the bytes are malformed, or do not fit the part.
        """
        if sent.dtype != torch.uint8 or len(sent) < _COUNT.size:
            raise ValueError("no rows")
        (num_tables,) = _COUNT.unpack(bytes(sent[: _COUNT.size].tolist()))
        at = _COUNT.size + num_tables * _TABLE.size
        if not num_tables >= 0 or at > len(sent):
            raise ValueError(f"{num_tables} tables")
        tables = list(_TABLE.iter_unpack(bytes(sent[_COUNT.size : at].tolist())))
        counts = [max(0, count) for *_, count in tables]
        if any(count < -1 for *_, count in tables) or 4 * sum(counts) != len(sent) - at:
            raise ValueError("another number of rows")
        rows: Rows = {}
        last = 0
        numbers = sent[at:].clone().view(torch.int32).long()
        for (first, past, width, count), own in zip(tables, numbers.split(counts), strict=True):
            if not (
                last <= first < past and width > 0 and (past - first) % width == 0 and first < end and past > begin
            ):
                raise ValueError(f"a table of elements {first} to {past} in rows of {width}")
            if len(own) and not (own[0] >= 0 and own[-1] < (past - first) // width and bool((own.diff() > 0).all())):
                raise ValueError("rows that do not ascend, or lie outside their table")
            rows[Table(first, past, width)] = own if count >= 0 else None
            last = past
        return cls(rows, begin, end, device)


def packed_bytes(num_rows: int, most: int) -> int:
    """The length of `pack`ed numbers of a table's rows, of which there are at most so many: 4 bytes each, or a bit per row."""
    return min(4 * most, -(-num_rows // 8))


def pack(numbers: torch.Tensor | None, num_rows: int, most: int) -> torch.Tensor:
    """Numbers of rows as bytes (packed_bytes,), if they are at most so many; others need not be sent."""
    out = np.zeros(packed_bytes(num_rows, most), np.uint8)
    if numbers is not None and len(numbers) <= most:
        if len(out) == 4 * most:
            out[: 4 * len(numbers)] = numbers.to("cpu", torch.int32).numpy().view(np.uint8)
        else:
            bits = np.zeros(num_rows, np.bool_)
            bits[numbers.cpu().numpy()] = True
            out[:] = np.packbits(bits)
    return torch.from_numpy(out)


def unpack(sent: torch.Tensor, num_rows: int, most: int, count: int) -> torch.Tensor:
    """The inverse of `pack`, for so many numbers."""
    if len(sent) == 4 * most:
        return sent.clone().view(torch.int32)[:count].long()
    return torch.from_numpy(np.flatnonzero(np.unpackbits(sent.numpy(), count=num_rows)))


def union(all_rows: Sequence[Rows], begin: int, end: int) -> Rows:
    """The rows of any of these, in a part of the flat vector; a table that is whole in one of them is whole."""
    found: dict[tuple[int, int], list[tuple[Table, torch.Tensor | None]]] = {}
    for rows in all_rows:
        for table, numbers in rows.items():
            here = max(table.begin, begin), min(table.end, end)
            found.setdefault(here, []).append((table, numbers))
    united: Rows = {}
    for ones in found.values():
        if len(ones) == len(all_rows):
            having = [(table, numbers) for table, numbers in ones if numbers is not None]
            table = (having or ones)[0][0]
            united[table] = torch.cat([numbers for _, numbers in having]).unique() if having else None
    return dict(sorted(united.items()))


def whole_but(missing: Sequence[tuple[int, int]]) -> Rows:
    """The rows of a dense gradient whose parameters at these elements of the flat vector have none."""
    return {Table(begin, end, end - begin): None for begin, end in missing}


def nothing_but(rows: Rows, begin: int, end: int) -> Rows:
    """Selects these rows of a part of the flat vector, and no other element of it."""
    only: Rows = {}
    for table, numbers in sorted(rows.items()):
        first, last = max(table.begin, begin), min(table.end, end)
        if first < last:
            if begin < first:
                only[Table(begin, first, first - begin)] = None
            only[table] = numbers
            begin = last
    if begin < end:
        only[Table(begin, end, end - begin)] = None
    return only


def sum_selected(
    ones: Sequence[tuple[torch.Tensor, Selection, float]], dtype: torch.dtype
) -> tuple[torch.Tensor, Selection]:
    """sum_i a_i v_i of values v_i (count_i,) at their selections in one part, in the order given; and its selection."""
    first = ones[0][1]
    rows = union([one.rows for _, one, _ in ones], first.begin, first.end)
    united = Selection(rows, first.begin, first.end, first.device)
    places = united.index()
    total = torch.zeros(united.count, dtype=dtype, device=first.device)
    for values, selection, factor in ones:
        total.index_add_(0, torch.searchsorted(places, selection.index()), values.to(dtype), alpha=factor)
    return total, united
