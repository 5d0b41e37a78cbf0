"""A partition's rows on the machine of its task: one pass of Spark's writes them, and every epoch reads them from there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["SpilledRows"]


class SpilledRows:
    """The rows of one partition, in a file without a name that is mapped into memory: whatever is killed, nothing is left.

    It lies where Spark keeps its own files (`SPARK_LOCAL_DIRS`), else where temporary files are.

    Costs: the partition's size on that disk; each step copies its own batch.

    Args:
        batches: of Spark's, as `mapInArrow` gives them (`pyarrow.RecordBatch`); read once, one after the other.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        import pyarrow as pa  # pyright: ignore[reportMissingImports]
        import pyarrow.compute  # pyright: ignore[reportMissingImports]

        self._pa: Any = pa
        self._parts: list[Any] = []
        writer = None
        with tempfile.TemporaryFile(prefix="paceline-", dir=_folder()) as file:
            for batch in batches:
                if batch.num_rows:
                    writer = writer if writer is not None else pa.ipc.new_file(file, batch.schema)
                    writer.write_batch(batch)
            if writer is not None:
                writer.close()
                file.flush()
                self._mapped = pa.memory_map(f"/proc/self/fd/{file.fileno()}")  # outlives the descriptor
                self._parts = pa.ipc.open_file(self._mapped).read_all().to_batches()
        self._ends = np.cumsum([part.num_rows for part in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def batch(self, rows: np.ndarray) -> dict[str, Any]:
        """Some of the rows, by column: numbers as a tensor (n,), lists of numbers alike long as (n, k), all else as a list."""
        rows = np.sort(rows)
        where = np.searchsorted(self._ends, rows, side="right")
        parts = []
        for index in np.unique(where):
            part = self._parts[index]
            parts.append(part.take(self._pa.array(rows[where == index] - (self._ends[index] - part.num_rows))))
        table = self._pa.Table.from_batches(parts).combine_chunks()
        return {name: _values(self._pa, table.column(name).combine_chunks()) for name in table.column_names}


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


def _folder() -> str | None:
    """One of Spark's folders on this machine that can be written to; None: that of temporary files."""
    for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
        if folder and Path(folder).is_dir() and os.access(folder, os.W_OK):
            return folder
    return None
