"""A partition's rows on its task's machine: written in one pass over Spark's data, and read again in every epoch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from paceline.errors import UsageError


@contextlib.contextmanager
def spilled(batches: Iterator[Any]) -> Iterator[IO[bytes]]:
    """An unnamed file with the rows of a partition: it disappears even if the process is killed.

    It lies where Spark keeps its own files (`SPARK_LOCAL_DIRS`), or else in the folder for temporary files. `batches` are from
    `mapInArrow` (`pyarrow.RecordBatch`), and read once.
    """
    import pyarrow as pa  # pyright: ignore[reportMissingImports]

    writer = None
    with tempfile.TemporaryFile(prefix="paceline-", dir=spark_folder()) as file:
        for batch in batches:
            if batch.num_rows:
                writer = writer if writer is not None else pa.ipc.new_file(file, batch.schema)
                writer.write_batch(batch)
        if writer is not None:
            writer.close()
            file.flush()
        yield file


class SpilledRows:
    """The rows of one partition, mapped into memory; each step copies its own batch.

    Args:
        descriptor: of the file that `spilled` has made; it may be closed afterwards.
    """

    def __init__(self, descriptor: int) -> None:
        import pyarrow as pa  # pyright: ignore[reportMissingImports]
        import pyarrow.compute  # pyright: ignore[reportMissingImports]

        self._pa: Any = pa
        self._parts: list[Any] = []
        if os.fstat(descriptor).st_size:
            self._mapped = pa.memory_map(f"/proc/self/fd/{descriptor}")
            self._parts = pa.ipc.open_file(self._mapped).read_all().to_batches()
        self._ends = np.cumsum([part.num_rows for part in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def batch(self, rows: np.ndarray) -> dict[str, Any]:
        """The given rows by column: numbers as a tensor (n,), lists of k numbers each as (n, k), everything else as a list.

        Raises:
            IndexError: there is no such row.
            UsageError: `rows` is empty.
        """
        if not len(rows):
            raise UsageError("rows[[]] asks for a batch without rows, which has no columns: leave it out.")
        if rows.min() < 0 or rows.max() >= len(self):
            wrong = rows.min() if rows.min() < 0 else rows.max()
            raise IndexError(f"rows has no row {wrong}, only rows 0 to {len(self) - 1}.")
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        where = np.searchsorted(self._ends, rows, side="right")
        parts = []
        for index in np.unique(where):
            part = self._parts[index]
            parts.append(part.take(self._pa.array(rows[where == index] - (self._ends[index] - part.num_rows))))
        table = self._pa.Table.from_batches(parts)
        if (np.diff(order) < 0).any():
            table = table.take(self._pa.array(np.argsort(order)))  # the inverse: back to the requested order
        table = table.combine_chunks()
        return {name: _values(self._pa, table.column(name).combine_chunks()) for name in table.column_names}


class Rows(Dataset[dict[str, Any]]):
    """The rows of one of Spark's tasks, for its loop.

    Args:
        seed: of the order in which loaders draw them.
    """

    def __init__(self, spilled: SpilledRows, seed: int) -> None:
        self._spilled = spilled
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._spilled)

    def __getitem__(self, rows: int | Sequence[int]) -> dict[str, Any]:
        """The given rows (n) by column, in order: numbers as a tensor (n,), lists of k numbers each as (n, k), else lists.

        Raises:
            IndexError: there is no such row; negative indices are not supported.
            UsageError: `rows` is empty.
        """
        return self._spilled.batch(np.atleast_1d(np.asarray(rows, dtype=np.int64)))

    def loader(self, batch_size: int, *, shuffle: bool = True, drop_last: bool = False) -> DataLoader[dict[str, Any]]:
        """A loader of batches.

        Args:
            batch_size: rows of a batch.
            shuffle: whether rows are drawn in a random order, another one in each epoch.
            drop_last: whether to drop a last batch of fewer rows.

        Costs: a copy of each batch; nothing is cached.

        Raises:
            UsageError: the batch size is not a positive integer.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UsageError(f"batch_size of rows.loader must be a whole number of 1 or more, not {batch_size!r}.")
        one: Any = RandomSampler(self, generator=self._generator) if shuffle and len(self) else SequentialSampler(self)
        return DataLoader(self, batch_size=None, sampler=BatchSampler(one, batch_size, drop_last))


def _values(pa: Any, column: Any) -> Any:
    """One column's values: nulls among numbers become NaN."""
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    kind = column.type
    if _is_number(pa, kind):
        return torch.tensor(column.to_numpy(zero_copy_only=False))
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if is_list and _is_number(pa, kind.value_type) and not column.null_count:
        flat = column.flatten().to_numpy(zero_copy_only=False)
        if len(flat) % len(column) == 0 and len(np.unique(pa.compute.list_value_length(column))) == 1:
            return torch.tensor(flat.reshape(len(column), -1))
    return column.to_pylist()


def _is_number(pa: Any, kind: Any) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def spark_folder() -> str | None:
    """A writable folder of Spark's on this machine; None: use the folder for temporary files."""
    for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
        if folder and Path(folder).is_dir() and os.access(folder, os.W_OK):
            return folder
    return None
