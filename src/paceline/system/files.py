"""Atomic file writes: under another name, synced to disk, and renamed.

Every file of a run, a study or a model is written this way, so that a kill at any instant, a full disk or a power failure
leaves the old file or the new one. A failed write is a one-sentence `NotWrittenError`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from paceline.errors import NotWrittenError, UsageError

CHECKSUM = "sha256_of_this"  # of JSON files: the key of their own checksum
_CHUNKS_AT_ONCE = 50_000
_MAKE_ROOM, _PERMISSION = "make room there", "choose a place that you may write to"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: _PERMISSION,
    errno.EIO: "its disk may be failing, so choose another place",
}


def not_written(path: Path, error: OSError) -> NotWrittenError:
    """The sentence about a file that cannot be written, with a remedy."""
    why = error.strerror or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0, "choose another place")
    return NotWrittenError(f"{path} cannot be written ({why}): {remedy}.")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError inside into a `NotWrittenError`, about `path` if the error names no file."""
    try:
        yield
    except OSError as error:
        raise not_written(Path(error.filename) if isinstance(error.filename, str) else path, error) from error


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Opens a file whose content replaces `path` when the `with` ends without an error.

    Costs: some milliseconds, until the content is on disk; `sync=False` does not wait for that. It does not wait for the
    folder's entry: after a power failure the old file may be there.

    Raises:
        NotWrittenError: the file cannot be written; `path` is unchanged.
    """
    if path.exists() and not path.is_file():
        raise NotWrittenError(f"{path} is not a regular file: name another.")
    target = path.resolve() if path.is_symlink() else path  # the link stays
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with new_file(temporary) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_chunks(path: Path, chunks: Iterable[str]) -> None:
    """Writes text piece by piece, as `replacing` does, without having all of it in memory."""
    rest = iter(chunks)
    with replacing(path) as file:
        for text in iter(lambda: "".join(islice(rest, _CHUNKS_AT_ONCE)), ""):
            file.write(text.encode(errors="backslashreplace"))


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Writes a text file, as `replacing` does: a reader sees the old one or the new one, never a part."""
    with replacing(path, sync=sync) as file:
        file.write(text.encode(errors="backslashreplace"))


def read_json(path: Path, default: Any) -> Any:
    """The content of one of Paceline's JSON files, of the same type as `default`; `default` if there is no file.

    Raises:
        UsageError: it cannot be read, or is damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}.") from None
    if not isinstance(value, type(default)):
        raise UsageError(f"{path} is damaged: it does not hold what a run writes there.")
    return value


def checksum_of(content: dict[str, Any]) -> str:
    """The SHA-256 of a JSON file's content, independent of its formatting; `content` has no `CHECKSUM`."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_checked_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file without the checksum in it; refuses a file that is damaged or has none."""
    content = read_json(path, {})
    if content.pop(CHECKSUM, None) != checksum_of(content):
        raise UsageError(
            f"{path} is damaged, or an earlier version of Paceline wrote it: its checksum does not match its "
            "contents. Put the file back as it was, or start the run again."
        )
    return content


def new_file(path: Path) -> IO[bytes]:
    """Opens a file for writing, and empties it if it exists; Paceline opens all its written files here."""
    return path.open("wb")


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_disk(folder: Path) -> None:
    """Syncs a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_unfinished(folder: Path) -> None:
    """Removes a killed process's unfinished files from a folder; only the folder's lock holder may call it."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()
