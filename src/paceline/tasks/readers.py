"""Readers of data files, which check what they read: a truncated download is an error, not a strange accuracy."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from paceline.system import plain_files

_PART_BYTES = 2**20
_MNIST_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def find_file(data: Path | None, candidates: list[str], *, what: str, remedy: str) -> Path:
    """The first of the candidate files that exists below the data folder; raises `UsageError` if none does."""
    if data is None:
        raise UsageError(f"{what} needs a data folder: give --data DIR or set PACELINE_DATA. {remedy}")
    for candidate in candidates:
        if (data / candidate).is_file():
            return data / candidate
    raise UsageError(f"{what}: {data} has no {candidates[0]}. {remedy}")


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file of unsigned bytes, gzip-compressed if its name ends in .gz.

    Raises:
        UsageError: the file is not IDX, or shorter or longer than its header says.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            header = file.read(4)
            if len(header) < 4 or header[:3] != b"\x00\x00\x08":
                raise UsageError(f"{path} is not an IDX file of unsigned bytes; download it again.")
            sizes = file.read(4 * header[3])
            if not sizes or len(sizes) < 4 * header[3]:
                raise UsageError(f"{path} ends within its IDX header; download it again.")
            shape = tuple(int(size) for size in np.frombuffer(sizes, dtype=">u4"))
            expected_bytes = 4 + len(sizes) + math.prod(shape)
            content = bytearray()  # read in parts: neither the header nor a packed file's size can be trusted
            while len(content) <= math.prod(shape) and (part := file.read(_PART_BYTES)):
                content += part
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({error}); download it again.") from error
    if (found_bytes := 4 + len(sizes) + len(content)) != expected_bytes:
        raise UsageError(
            f"{path} holds {found_bytes} bytes or more where its IDX header announces {expected_bytes}; download it again."
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def read_npz(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Read arrays from an NPZ file, by name, each with its expected shape after the first dimension; loads no pickles.

    Raises:
        UsageError: the file is not an NPZ file, or an array is missing or has another shape.
    """
    arrays = plain_files.read_npz(path, "download it again")
    missing = [key for key in shapes if key not in arrays]
    if missing:
        raise UsageError(f"{path} has no array '{missing[0]}'; it needs {', '.join(shapes)}.")
    for key, shape in shapes.items():
        if arrays[key].shape[1:] != shape:
            raise UsageError(f"{path} array '{key}' has shape {arrays[key].shape}; expected (samples, *{shape}).")
    return {key: arrays[key] for key in shapes}


def mnist_arrays(data: Path | None) -> dict[str, np.ndarray]:
    """MNIST's four arrays: `train_images` (60000, 28, 28) and so on, uint8; from `data/mnist` or `data` itself."""
    names = ", ".join(f"{name}.gz" for name in _MNIST_FILES.values())
    remedy = f"Put MNIST's four files there ({names}); yann.lecun.com/exdb/mnist and its mirrors have them."
    arrays = {}
    for key, name in _MNIST_FILES.items():
        candidates = [f"{folder}{name}{suffix}" for folder in ("mnist/", "") for suffix in (".gz", "")]
        path = find_file(data, candidates, what="MNIST", remedy=remedy)
        arrays[key] = read_idx(path)
        shape = (28, 28) if key.endswith("images") else ()
        if arrays[key].shape[1:] != shape:
            raise UsageError(f"{path} has shape {arrays[key].shape}; expected (samples, *{shape}).")
    for part in ("train", "test"):
        images, labels = len(arrays[f"{part}_images"]), len(arrays[f"{part}_labels"])
        if images != labels:
            raise UsageError(
                f"MNIST's {part} files do not match: {images} images, {labels} labels; download both again."
            )
    return arrays


def image_datasets(
    arrays: Mapping[str, np.ndarray], inputs: Callable[[Tensor], Tensor]
) -> tuple[TensorDataset, TensorDataset]:
    """The data sets of `train_images`, `train_labels`, `test_images` and `test_labels`; `inputs` makes a model's of images."""
    train, test = (
        TensorDataset(
            inputs(torch.tensor(arrays[f"{part}_images"])), torch.tensor(arrays[f"{part}_labels"], dtype=torch.int64)
        )
        for part in ("train", "test")
    )
    return train, test
