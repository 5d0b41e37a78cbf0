"""Locks folders so that only one process at a time writes to them, and the files of two runs never mix."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import NotWrittenError, UsageError
from paceline.system import files
from paceline.system.interrupts import ended_by_system

_LOCK = ".lock"
_NO_LOCKS_THERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system without them
_MOST_WORDS = 200
_MOST_LOST = 10


@contextlib.contextmanager
def run_folder(out: Path | None, resume: Path | None = None) -> Iterator[int]:
    """Locks the folder that a run writes, and keeps others from changing the one from which it resumes.

    Args:
        out: to write into: empty, missing, or the resumed run's; None: nothing is written.
        resume: of the run to resume.

    Yields a descriptor of `out`'s lock, as `locked` does; -1 without one.

    Raises:
        UsageError: another process writes one of them, `out` holds something else or cannot be written, or `resume` holds no
            run.
    """
    if resume is not None and not (resume / "config.json").is_file():
        raise UsageError(f"{resume} is not the folder of a run: it has no config.json.")
    same = out is not None and resume is not None and out.resolve() == resume.resolve()
    with ended_by_system(), contextlib.ExitStack() as both:
        lock = -1
        if resume is not None and not same:
            both.enter_context(locked_for_reading(resume))
        if out is not None:
            lock = both.enter_context(locked(out))
            if not same and not is_empty(out):
                raise UsageError(f"{out} is not empty: choose another `out`, or continue that run with `resume`.")
        yield lock


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Keeps other processes from locking or reading this folder; the system frees the lock when the process ends.

    Yields a descriptor: a process that inherits it holds the lock, too. Makes the folder and its parents if they are missing,
    and removes them again if they stay empty. Removes unfinished files of a killed process.

    Raises:
        UsageError: another process holds the folder, or it cannot be written.
    """
    with _removed_if_empty(folder):
        try:
            lock = _locked(folder, fcntl.LOCK_EX)
        except NotWrittenError as error:
            raise UsageError(str(error)) from error
        try:
            files.clear_unfinished(folder)
            yield lock
        finally:
            _release(folder, lock)


@contextlib.contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Removes the folder and its parents afterwards if they are new and empty."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # one holds something, as it should
            for one in made:
                one.rmdir()


@contextlib.contextmanager
def locked_for_reading(folder: Path) -> Iterator[None]:
    """Keeps processes from locking this folder for writing; refuses a folder that one has locked."""
    try:
        lock = _locked(folder, fcntl.LOCK_SH)
    except NotWrittenError:  # a reader needs no lock in a folder that it cannot write
        yield
        return
    try:
        yield
    finally:
        _release(folder, lock)


def is_empty(folder: Path) -> bool:
    """Whether a folder holds nothing but a lock."""
    return all(path.name == _LOCK for path in folder.iterdir())


def _locked(folder: Path, kind: int) -> int:
    """A descriptor of the folder's lock, locked."""
    path = folder / _LOCK
    lost = 0  # how often another process has just removed the parent that it had made
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and lost < _MOST_LOST:
                lost += 1
                continue
            why = error.strerror or type(error).__name__
            raise NotWrittenError(f"{folder} cannot be made ({why}): choose another place.") from error
        with files.writing(folder):
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # the previous holder has just removed the folder
                continue
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except OSError as error:
            holder = "".join(one for one in os.pread(lock, 4096, 0).decode(errors="replace") if one.isprintable())
            os.close(lock)
            if error.errno in _NO_LOCKS_THERE:
                return os.open(os.devnull, os.O_RDONLY)
            raise UsageError(
                f"{folder} is in use by {holder or 'another process'}: wait for it or end it, or choose another folder."
            ) from error
        if _is_file(path, lock):
            if kind == fcntl.LOCK_EX:
                _write_who(lock)
            return lock
        os.close(lock)  # the previous holder removed the file between our opening and locking it


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_who(lock: int) -> None:
    words = shlex.join(sys.argv)
    words = words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}..."
    holder = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M')} ({words})"
    with contextlib.suppress(OSError):  # a full disk has no room for the words; the lock itself needs none
        os.ftruncate(lock, 0)
        os.pwrite(lock, holder.encode(errors="replace"), 0)


def _release(folder: Path, lock: int) -> None:
    """Removes the lock's file, if no other process has it locked, and then the lock."""
    path = folder / _LOCK
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_file(path, lock):
            path.unlink()
    os.close(lock)
