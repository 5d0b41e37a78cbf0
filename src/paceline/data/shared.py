"""The training set, in memory once for all workers of a machine."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.memory.segment import Layout, Segment


@dataclass(frozen=True)
class DatasetHandle:
    """How a worker accesses the training set: tensors in a shared segment, or the pickled data set itself."""

    # Offset, shape and type of each tensor of a `TensorDataset` in the segment.
    tensors: tuple[tuple[int, tuple[int, ...], torch.dtype], ...] = ()
    size_bytes: int = 0  # of the segment
    # Any other data set; sent to a process as bytes, as the worker must first load the user's file that may define its
    # class.
    dataset: Dataset[Any] | bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        dataset = self.dataset if self.dataset is None else pickle.dumps(self.dataset)
        return DatasetHandle, (self.tensors, self.size_bytes, dataset)


def share_dataset(dataset: Dataset[Any]) -> tuple[DatasetHandle, Segment | None]:
    """Copies a `TensorDataset` into shared memory; other data sets are pickled to every worker."""
    if type(dataset) is not TensorDataset:
        return DatasetHandle(dataset=dataset), None
    layout = Layout()
    places = tuple(
        (layout.reserve(str(index), max(1, tensor.nbytes)), tuple(tensor.shape), tensor.dtype)
        for index, tensor in enumerate(dataset.tensors)
    )
    segment = Segment.create(layout.size_bytes)
    for (offset, shape, dtype), tensor in zip(places, dataset.tensors, strict=True):
        segment.tensor(offset, shape, dtype).copy_(tensor)
    return DatasetHandle(places, layout.size_bytes), segment


def open_dataset(handle: DatasetHandle, descriptors: tuple[int, ...]) -> Dataset[Any]:
    """Opens the data set in a worker that has loaded the task; `descriptors`: the received ones."""
    if isinstance(handle.dataset, bytes):
        return pickle.loads(handle.dataset)
    if handle.dataset is not None:
        return handle.dataset
    segment = Segment.from_fd(descriptors[0], handle.size_bytes)
    return TensorDataset(*(segment.tensor(*place) for place in handle.tensors))
