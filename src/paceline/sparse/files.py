"""Sparse data from files: svmlight/libsvm text, NPZ, and ratings as CSV."""

from __future__ import annotations

import bz2
import csv
import gzip
import math
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from paceline.errors import UsageError, first_line
from paceline.specs.bounds import available_bytes, check_memory
from paceline.system.plain_files import read_npz

_LABELS = ("y", "labels", "targets")
_UNPACK: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
_NUMBERS_PER_FEATURE = 6
"""A model on two threads: its weights, a copy and a base for each thread, and how frequent features are."""


class Ratings(NamedTuple):
    """Users and items by number, and their names in the file."""

    matrix: sparse.csr_matrix
    users: np.ndarray
    items: np.ndarray


def read_labelled(path: Path, *, features: int | None = None, labels: bool = True) -> tuple[Any, np.ndarray]:
    """A matrix and its labels.

    Args:
        path: `.npz` as of `scipy.sparse.save_npz`, or with a dense `X`, and labels `y`; anything else is svmlight text.
        features: of the model that the data is for; the file may have fewer, but not more.
        labels: whether an NPZ file must have them.

    Raises:
        UsageError: the file is invalid; the message names the line.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file; check the path.")
    if path.stat().st_size == 0:
        raise UsageError(f"{path} is empty.")
    matrix, targets = _read_npz(path, labels) if path.suffix == ".npz" else _read_svmlight(path, features)
    check_memory(
        _NUMBERS_PER_FEATURE * 8 * matrix.shape[1],
        f"a model of features up to number {matrix.shape[1]}, as {path} has them",
        "number the features without gaps, or hash them",
    )
    return matrix, targets


def _read_svmlight(path: Path, features: int | None) -> tuple[Any, np.ndarray]:
    from sklearn.datasets import load_svmlight_file

    # An entry as short as " 9:1" becomes 12 bytes; arrays grow by doubling while they are read.
    _check_size(path, 4 * _text_bytes(path, available_bytes() // 4))
    try:
        loaded: Any = load_svmlight_file(str(path), zero_based="auto")
        matrix, labels = loaded[0], loaded[1]
    except (ValueError, OverflowError, IndexError) as error:
        number, why = _first_bad_line(path)
        where = f"line {number}: {why}" if number else str(error)
        raise UsageError(f"{path}, {where}. A line is: label index:value index:value ...") from error
    if not matrix.shape[0]:
        raise UsageError(f"{path} has no examples.")
    if features is not None:
        if matrix.shape[1] > features:
            raise UsageError(f"{path} has {matrix.shape[1]} features, but the model has {features}.")
        matrix.resize(matrix.shape[0], features)
    _refuse_bad_numbers(path, matrix.data, labels)
    return matrix, labels


def _text_bytes(path: Path, enough: int) -> int:
    """Length of the uncompressed text; reads little more than `enough` of it."""
    if path.suffix not in _UNPACK:
        return path.stat().st_size
    length = 0
    try:
        with _UNPACK[path.suffix](path) as text:
            while length <= enough and (part := text.read(2**20)):
                length += len(part)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} is damaged or cut short ({first_line(error)}); download it again.") from error
    return length


def _first_bad_line(path: Path) -> tuple[int, str]:
    with _UNPACK.get(path.suffix, open)(path, "rt", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            last = -1
            for place, word in enumerate(words):
                index, colon, value = word.partition(":")
                if place == 0 and not colon:
                    if not _is_number(word):
                        return number, f"the label '{word}' is not a number"
                    continue
                if index == "qid":
                    continue
                if not colon or not index.isdigit() or not _is_number(value):
                    return number, f"'{word}' is not index:value"
                if int(index) >= 2**31:
                    return number, f"index {index} is too large"
                if int(index) <= last:
                    kind = "twice" if int(index) == last else "unsorted"
                    return number, f"index {index} is {kind}; indices must rise"
                last = int(index)
    return 0, ""


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _read_npz(path: Path, labels: bool) -> tuple[Any, np.ndarray]:
    held = read_npz(path, "write it again, as numpy.savez does")
    names = ", ".join(sorted(held)) or "nothing"
    matrix: Any
    for name in ("X", "data"):
        if name in held and held[name].dtype.kind not in "fiub":
            raise UsageError(f"{name} in {path} must hold real numbers, not {held[name].dtype}.")
    if "X" in held:
        matrix = np.ascontiguousarray(held["X"], dtype=np.float32 if held["X"].dtype == np.float32 else np.float64)
        if matrix.ndim != 2:
            raise UsageError(f"X in {path} must have two dimensions, not {matrix.ndim}.")
    elif {"data", "indices", "indptr", "shape"} <= held.keys():
        kind = held.get("format", np.array(b"csr")).item()
        if kind not in (b"csr", "csr"):
            raise UsageError(
                f"{path} holds a matrix in {kind!r}; save it as CSR: scipy.sparse.save_npz(path, X.tocsr())."
            )
        try:
            matrix = sparse.csr_matrix((held["data"], held["indices"], held["indptr"]), shape=tuple(held["shape"]))
            matrix.check_format(full_check=True)
        except (ValueError, TypeError) as error:
            raise UsageError(f"The CSR matrix in {path} is damaged: {error}") from error
        if matrix.dtype not in (np.float32, np.float64):
            matrix = matrix.astype(np.float64)
    else:
        raise UsageError(
            f"{path} holds {names}; it needs X, or data, indices, indptr and shape as scipy.sparse.save_npz writes."
        )
    if 0 in matrix.shape:
        raise UsageError(
            f"{path} has {matrix.shape[0]} examples of {matrix.shape[1]} features; give it at least one of each."
        )
    target = next((held[name] for name in _LABELS if name in held), None)
    if target is None:
        if labels:
            raise UsageError(f"{path} has no labels: it holds {names}, and needs y.")
        target = np.zeros(matrix.shape[0])
    if target.shape != (matrix.shape[0],):
        raise UsageError(f"y in {path} has shape {target.shape}, but X has {matrix.shape[0]} rows.")
    _refuse_bad_numbers(path, matrix.data if sparse.issparse(matrix) else matrix, target)
    return matrix, target


def read_ratings(path: Path) -> Ratings:
    """Reads a CSV file of user, item, rating; ignores more columns, and a first line without a numeric rating.

    Raises:
        UsageError: the message says what is wrong, and in which line.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file; check the path.")
    _check_size(path, 12 * path.stat().st_size)
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    rows, columns, values = [], [], []
    with path.open(newline="", errors="replace") as text:
        lines = csv.reader(text)
        try:
            for fields in lines:
                if not fields:
                    continue
                if len(fields) < 3 or not _is_number(fields[2]):
                    if lines.line_num == 1 and len(fields) >= 3:
                        continue
                    raise UsageError(
                        f"{path}, line {lines.line_num}: '{','.join(fields)[:60]}' is not user,item,rating."
                    )
                value = float(fields[2])
                if not math.isfinite(value):
                    raise UsageError(f"{path}, line {lines.line_num}: the rating is {fields[2]}; it must be finite.")
                rows.append(users.setdefault(fields[0], len(users)))
                columns.append(items.setdefault(fields[1], len(items)))
                values.append(value)
        except csv.Error as error:
            raise UsageError(f"{path}, line {lines.line_num}: {error}.") from error
    if not values:
        raise UsageError(f"{path} has no ratings.")
    matrix = sparse.csr_matrix((values, (rows, columns)), shape=(len(users), len(items)))
    if matrix.nnz < len(values):
        raise UsageError(
            f"{path} has {len(values) - matrix.nnz} repeated ratings of the same user and item; keep one of each."
        )
    return Ratings(matrix, np.array(list(users)), np.array(list(items)))


def _check_size(path: Path, needed_bytes: int) -> None:
    """Rejects a file that will not fit into memory, before reading it."""
    check_memory(needed_bytes, str(path), "split it and use partial_fit of paceline.sklearn.HogwildClassifier")


def _refuse_bad_numbers(path: Path, values: np.ndarray, labels: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise UsageError(f"{path} has values that are NaN or infinite; remove them.")
    if np.issubdtype(labels.dtype, np.floating) and not np.isfinite(labels).all():
        raise UsageError(f"{path} has labels that are NaN or infinite; remove them.")
