"""The mean of gradients with sparse parts: of the rows that any worker's gradient has, and of all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress

import torch

from paceline.algorithms.gradient_round import GradientRound
from paceline.algorithms.round_messages import Heard
from paceline.optim.half_types import sum_type
from paceline.optim.rows import Rows, Selection, pack, packed_bytes, union, unpack
from paceline.ports.ports import NUM_NUMBERS, Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import ReplicatedParameters

_NO_GRADIENT, _DENSE = -1, -2  # in place of a number of rows


def averaging(replica: Replica, ports: Ports[ReplicatedParameters], gradient: GradientRound) -> Callable[[], None]:
    """What replaces the gradient of a replica's step by the mean of all, weighted by samples."""
    if not replica.tables:
        return gradient.average
    if ports.num_workers == 1:
        return lambda: None
    return TableMean(replica, ports, gradient, gradient.end_mean).average


class TableMean:
    """sum_k (w_k / u) g_k / sum_k (w_k / u) as in dense rounds, of gradients that are sparse in the replica's `tables`.

    The workers tell each other how many rows of each table their gradients have, then which. All then know the union of the
    rows, and sum one vector: the header, these rows in order, and all other parameters. So a worker that dies
    counts with its whole gradient or not at all, and rows that only it has are left out. A table with a dense gradient on any
    worker gets a dense mean. A table whose gradient has no row on any worker gets a sparse mean without rows.

    Costs per mean of m workers: an all-gather of 8 bytes per table; one of the rows' numbers, of 4 bytes for each row or a bit
    for each row of the table, whichever is less; and an all-reduce of the union's rows. It starts when backward has ended.

    Args:
        gradient: the round.
        end: ends the mean, given what all have said and a function that returns the mean as one vector (P,).
    """

    def __init__(
        self,
        replica: Replica,
        ports: Ports[ReplicatedParameters],
        gradient: GradientRound,
        end: Callable[[Heard, Callable[[], torch.Tensor]], None],
    ) -> None:
        assert ports.collectives is not None
        self._replica, self._ports, self._collectives = replica, ports, ports.collectives
        self._gradient, self._end = gradient, end
        self._num_elements = ports.shared.x.numel()
        self._num_rows = [(table.end - table.begin) // table.width for table in replica.tables]
        replica.take_tables()

    def average(self) -> None:
        replica, gradient, g = self._replica, self._gradient, self._replica.g
        counts = self._gather_counts(replica.rows or {})
        rows_of = self._gather_rows(counts)
        united = self._selection(list(rows_of.values()), g)
        vector = g.new_zeros(NUM_NUMBERS + united.count, dtype=sum_type(g.dtype))
        values = vector[NUM_NUMBERS:]
        self._selection([rows_of[self._ports.worker_id]], g).spread(g, united, values)
        values.mul_(replica.samples / gradient.unit)
        vector[:NUM_NUMBERS] = vector.new_tensor(gradient.header(replica.samples).numbers)
        self._ports.moved(4, of=vector)  # gathered and divided
        members = self._collectives.start_all_reduce(vector).wait()
        heard = gradient.heard_from(vector[:NUM_NUMBERS].tolist())
        if heard.samples:
            values.div_(heard.samples / gradient.unit)
        if len(members) < len(rows_of):  # one died after it had told of its rows
            left = self._selection([rows_of[one] for one in members], g)
            united, values = left, left.take(self._whole(united, values))
        are_dense = [any(counts[one][number] == _DENSE for one in members) for number in range(len(self._num_rows))]
        dense = set(compress(replica.tables, are_dense))
        rows = {table: numbers for table, numbers in united.rows.items() if table not in dense}
        replica.put(rows, values.to(g.dtype))
        self._end(heard, lambda: self._whole(united, values))

    def _gather_counts(self, rows: Rows) -> dict[int, list[int]]:
        """How many rows of each table each worker's gradient has."""
        own = [_count(rows[table]) if table in rows else _DENSE for table in self._replica.tables]
        counts = torch.full((self._ports.num_workers * len(own),), _NO_GRADIENT)
        members = self._collectives.start_all_gather(torch.tensor(own), counts).wait()
        counts_of = counts.view(-1, len(own)).tolist()
        return {one: counts_of[one] for one in members}

    def _gather_rows(self, counts: Mapping[int, Sequence[int]]) -> dict[int, Rows]:
        """Each worker's rows; those of a table of which it has all need not be sent."""
        tables, num_rows, own = self._replica.tables, self._num_rows, self._replica.rows or {}
        by_table = list(zip(*counts.values(), strict=True))
        most = [max([0, *(n for n in ns if n < of)]) for ns, of in zip(by_table, num_rows, strict=True)]
        sizes = [*map(packed_bytes, num_rows, most)]
        members, sent = counts.keys(), torch.zeros(self._ports.num_workers, sum(sizes), dtype=torch.uint8)
        if sum(sizes):
            part = torch.cat([pack(own.get(t), *of) for t, *of in zip(tables, num_rows, most, strict=True)])
            members = self._collectives.start_all_gather(part, sent.view(-1)).wait()
        found = {}
        for one in members:
            given = zip(sent[one].split(sizes), num_rows, most, counts[one], strict=True)
            found[one] = dict(zip(tables, (_rows(*part) for part in given), strict=True))
        return found

    def _selection(self, all_rows: Sequence[Rows], g: torch.Tensor) -> Selection:
        return Selection(union(all_rows, 0, self._num_elements), 0, self._num_elements, g.device)

    def _whole(self, selection: Selection, values: torch.Tensor) -> torch.Tensor:
        x = values.new_zeros(self._num_elements)
        selection.put(x, values)
        return x


def _count(numbers: torch.Tensor | None) -> int:
    return _NO_GRADIENT if numbers is None else len(numbers)


def _rows(sent: torch.Tensor, num_rows: int, most: int, count: int) -> torch.Tensor | None:
    """The numbers of a table's rows that a worker has sent."""
    if count == _NO_GRADIENT:
        return None
    return torch.arange(num_rows) if count in (_DENSE, num_rows) else unpack(sent, num_rows, most, count)
