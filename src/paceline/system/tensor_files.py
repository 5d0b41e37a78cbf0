"""Files of tensors and plain values: written atomically, with a digest of their bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO, Any

import torch

from paceline.errors import UsageError
from paceline.system import files


class _Digesting:
    """A file that computes its digest while PyTorch writes it piece by piece."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, piece: Any) -> int:
        """Writes a piece; keeps its error, because PyTorch may raise its own instead."""
        try:
            written = self._file.write(piece)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(piece)
        return written

    def flush(self) -> None:
        self._file.flush()


def save(path: Path, content: dict[str, Any], *, sync: bool = True) -> str:
    """Writes `content`, as `files.replacing` does; returns the SHA-256 of the file's bytes.

    Costs: PyTorch's own writing; the digest, 0.8 s of processor time per GB with SHA instructions; with `sync`, the wait for
        the disk.

    Raises:
        NotWrittenError: it cannot be written; `path` is unchanged.
    """
    with files.replacing(path, sync=sync) as file:
        target = _Digesting(file)
        try:
            torch.save(content, target)  # type: ignore[arg-type]  # it has what PyTorch calls
        except RuntimeError:
            if target.error is None:
                raise
            raise target.error from None
        return target.digest.hexdigest()


def load(path: Path, what: str, *, mapped: bool = False) -> dict[str, Any]:
    """Reads a file of `save` without running any code in it. Elements of `mapped` tensors are read when they are used.

    Raises:
        UsageError: it cannot be read; the message begins with `what`, and has no remedy and no full stop.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # PyTorch and pickle raise many types of errors for a damaged file
        raise UsageError(f"{what} {path} cannot be read: it is damaged") from error
    if not isinstance(found, dict):
        raise UsageError(f"{what} {path} cannot be read: its contents are of another kind")
    return found
