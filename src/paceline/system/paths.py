"""Checks paths of results before the work, so that an hour of training does not end at a folder that cannot be made."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import UsageError, printable
from paceline.system.limits import temporary_folder

_LONGEST = 70  # bytes; the path of a Unix socket in it may have 107


def socket_folder() -> str:
    """The parent of folders for Unix sockets: the temporary folder, or /tmp if that path is too long."""
    usual = temporary_folder()
    return usual if len(os.fsencode(usual)) <= _LONGEST else "/tmp"


def check_new_folder(path: Path, what: str) -> None:
    """Refuses a folder that cannot be made or written into; makes nothing. `what` names it, as in "--out runs/first"."""
    try:
        nearest = next(one for one in (path, *path.parents) if _exists(one))
        if nearest == path and not path.is_dir():
            raise UsageError(f"{what} is a file; name a folder.")
        _check_folder(nearest, what)
    except OSError as error:
        raise _impossible(what, error) from error


def check_new_file(path: Path, what: str) -> None:
    """Refuses a file that cannot be written; makes nothing."""
    try:
        if path.is_dir():
            raise UsageError(f"{what} is a folder; name a file in it.")
        if not _exists(path.parent):
            raise UsageError(f"{what}: there is no folder {printable(str(path.parent))}; make it first.")
        _check_folder(path.parent, what)
        if _exists(path) and not path.is_file():
            raise UsageError(f"{what} is not a regular file; name another.")
        if path.exists() and not os.access(path, os.W_OK):
            raise UsageError(f"{what} cannot be written; choose another place.")
    except OSError as error:
        raise _impossible(what, error) from error


def _exists(path: Path) -> bool:
    """Whether the path exists; unlike `Path.exists`, raises if the name is too long."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _check_folder(path: Path, what: str) -> None:
    if not path.is_dir():
        raise UsageError(f"{what} cannot be made: {printable(str(path))} is not a folder; choose another place.")
    if not os.access(path, os.W_OK | os.X_OK):
        where = printable(str(path))
        raise UsageError(f"{what} cannot be made: {where} is not writable; choose another place.")


def _impossible(what: str, error: OSError) -> UsageError:
    return UsageError(f"{what} cannot be made: {error.strerror}; choose another place.")
