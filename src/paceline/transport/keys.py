"""The key that all workers of a run share where messages leave the machine (ZeroMQ CURVE), in a file of the user's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import zmq

from paceline.errors import UsageError

__all__ = ["Keys", "create_keys", "load_keys"]


class Keys(NamedTuple):
    """One key pair for every worker of a run: whoever has it may join, and proves it on both ends of a connection."""

    public: bytes  # Z85, 40 characters
    secret: bytes


def create_keys(path: Path) -> Keys:
    """Makes a new key pair in a new file that only its owner may read."""
    keys = Keys(*zmq.curve_keypair())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError(f"Cannot write the key file {path}: {error.strerror}.") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(keys.public + b"\n" + keys.secret + b"\n")
    return keys


def load_keys(path: Path) -> Keys:
    """Reads what `create_keys` wrote."""
    if path.exists() and not path.is_file():  # of a pipe, nobody knows the end
        raise UsageError(f"The key file {path} is no file: name what `paceline key` wrote.")
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            lines = file.read(1024).split()
    except OSError as error:
        raise UsageError(f"Cannot read the key file {path}: {error.strerror}.") from None
    if mode & 0o077:
        raise UsageError(f"The key file {path} may be read by others (mode {mode:o}): run `chmod 600 {path}`.")
    try:
        public, secret = lines
        if zmq.curve_public(secret) != public:
            raise ValueError
    except (ValueError, zmq.ZMQError):
        raise UsageError(f"The key file {path} holds no key pair: make a new one for all workers.") from None
    return Keys(public, secret)
