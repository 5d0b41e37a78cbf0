"""The key that all workers of a run share if messages leave the machine (ZeroMQ CURVE), in a user's file."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

import zmq

from paceline.errors import UsageError
from paceline.system.limits import temporary_folder

_REMEDY = "Set XDG_RUNTIME_DIR to a folder that only you may use, or give all workers a key file (--key)."


class Keys(NamedTuple):
    """One key pair for all workers of a run; both ends of a connection must prove that they have it."""

    public: bytes  # Z85, 40 characters
    secret: bytes

    def __repr__(self) -> str:  # logs and errors show it, also as part of other objects
        return f"Keys(public={self.public!r}, secret=...)"


def new_keys() -> Keys:
    """Makes a new key pair in this process's memory only."""
    return Keys(*zmq.curve_keypair())


def create_keys(path: Path) -> Keys:
    """Makes a new key pair in a new file that only its owner may read."""
    keys = new_keys()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(keys.public + b"\n" + keys.secret + b"\n")
        except OSError:
            path.unlink()
            raise
    except OSError as error:
        raise UsageError(f"Cannot write the key file {path}: {error.strerror}.") from None
    return keys


def load_keys(path: Path | Keys) -> Keys:
    """Reads what `create_keys` wrote; returns `Keys` unchanged."""
    if isinstance(path, Keys):
        return path
    if path.exists() and not path.is_file():  # reading a pipe might never end
        raise UsageError(f"The key file {path} is not a file: name one that `paceline key` wrote.")
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            lines = file.read(1024).split()
    except OSError as error:
        raise UsageError(f"Cannot read the key file {path}: {error.strerror}.") from None
    if mode & 0o077:
        raise UsageError(f"Other users can read the key file {path} (mode {mode:o}): run `chmod 600 {path}`.")
    try:
        public, secret = lines
        if zmq.curve_public(secret) != public:
            raise ValueError
    except (ValueError, zmq.ZMQError):
        raise UsageError(f"The key file {path} holds no key pair: make a new one for all workers.") from None
    return Keys(public, secret)


def own_keys() -> Keys:
    """This user's key for runs on this machine only; the first process to ask makes it.

    It lies in $XDG_RUNTIME_DIR, or, if others can use that folder, in a private folder for temporary files.

    Raises:
        UsageError: another user owns that folder, or it cannot be written.
    """
    path = _own_folder() / "paceline.key"
    if not path.exists():
        new = path.with_name(f".{secrets.token_hex(8)}.key")
        create_keys(new)
        try:
            path.hardlink_to(new)
        except FileExistsError:  # another process was faster
            pass
        except OSError as error:
            raise UsageError(f"Cannot write the key file {path}: {error.strerror}. {_REMEDY}") from None
        finally:
            new.unlink()
    return load_keys(path)


def _own_folder() -> Path:
    folder = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if folder.is_absolute() and _is_own(folder):
        return folder
    folder = Path(temporary_folder()) / f"paceline-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(f"Cannot make the folder {folder}: {error.strerror}. {_REMEDY}") from None
    if not _is_own(folder):
        raise UsageError(f"Another user owns {folder}, or can read or write in it. {_REMEDY}")
    return folder


def _is_own(folder: Path) -> bool:
    """Whether it is a folder, not a link, that only this user may use."""
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
