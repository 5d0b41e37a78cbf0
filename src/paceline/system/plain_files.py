"""Readers for untrusted files of plain data: TOML, JSON and NumPy archives; a damaged file is a one-sentence error."""

from __future__ import annotations

import json
import lzma
import threading
import tokenize
import tomllib
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paceline.errors import UsageError, first_line
from paceline.specs.bounds import check_memory

_DEEPEST = 40
_LONGEST = 2**63  # of an array's dimensions
# Errors of zipfile (also for encrypted files and unknown kinds), its decoders and NumPy's header parser.
_DAMAGED = (
    OSError, EOFError, ValueError, RuntimeError, SyntaxError, MemoryError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError,
)  # fmt: skip

# NumPy reads a header by `ast.literal_eval`, whose depth is counted for all threads together before Python 3.11.8: with two of
# them at once, the count of one is wrong for the other, a SystemError.
_one_at_a_time = threading.Lock()


def read_table(path: Path, what: str) -> Any:
    """The content of a TOML or JSON file, by its suffix; messages begin with `what`, such as "The cluster file".

    Raises:
        UsageError: it cannot be read, or is not such a file.
    """
    if not path.is_file():
        raise UsageError(f"{what} {path} {'is not a file' if path.exists() else 'does not exist'}; check the path.")
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError, MemoryError) as error:  # decoders', bytes that are no UTF-8, nested too deeply
        raise UsageError(f"{what} {path} is not valid {path.suffix[1:].upper()}: {first_line(error)}.") from error
    if _depth(table) > _DEEPEST:
        raise UsageError(f"{what} {path} is nested more than {_DEEPEST} deep; make it flatter.")
    return table


def _depth(value: Any) -> int:
    """How deeply tables and lists are nested, at most one more than `_DEEPEST`: dotted keys nest without end in TOML."""
    depth, level = 0, [value]
    while level and depth <= _DEEPEST:
        level = [one for outer in level if isinstance(outer, dict | list) for one in _inside(outer)]
        depth += 1
    return depth


def _inside(outer: dict[str, Any] | list[Any]) -> Collection[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def read_npz(path: Path | BinaryIO, remedy: str) -> dict[str, np.ndarray]:
    """All arrays of an NPZ file; loads no pickles, and no array whose size differs from its header.

    Raises:
        UsageError: it is not an NPZ file (the message ends with `remedy`), or does not fit into memory.
    """
    what = path if isinstance(path, Path) else "What was sent"
    try:
        with _one_at_a_time:
            return _read_checked(path, what)
    except UsageError:
        raise
    except _DAMAGED as error:
        raise UsageError(
            f"{what} is not a readable NPZ file of plain arrays ({first_line(error)}); {remedy}."
        ) from error


def _read_checked(path: Path | BinaryIO, what: Path | str) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        total = sum(_check_member(archive, entry) for entry in archive.infolist())
    check_memory(2 * total, f"{what} and what is made of it", "take a part of it")
    if not isinstance(path, Path):
        path.seek(0)
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _check_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> int:
    """Bytes of one array, which its header must not exceed: NumPy makes the array before it reads it."""
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        held = entry.file_size - file.tell()
    if not all(type(size) is int and 0 <= size < _LONGEST for size in shape):
        raise ValueError(f"{entry.filename} claims a shape of {shape}")
    claimed = dtype.itemsize
    for size in shape:
        claimed *= size
    if claimed != held:
        raise ValueError(f"{entry.filename} claims {claimed:,} bytes of numbers and holds {held:,}")
    return claimed
