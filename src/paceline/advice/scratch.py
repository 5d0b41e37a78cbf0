"""Scratch folders for short runs and simulations of a user's loop, which may not write elsewhere."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError

_MOST_ENTRIES = 1000  # of a folder whose entries are linked one by one; larger ones become one link
_MOST_DEPTH = 4
_WHOLE = {".git", ".venv", "__pycache__", "node_modules"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_FREE = ("/dev", "/proc", "/sys")
_PATHS = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "shutil.rmtree": 1}


class WritesElsewhereError(UsageError):
    """The loop tries to write outside its scratch folder."""


@dataclass(frozen=True)
class Scratch:
    """Working folders for calls of a loop, which look like the user's folder.

    They contain links to the user's files, which become copies when the loop writes to them. Writing elsewhere raises an
    error unless allowed, except in temporary folders, caches and devices. Of the files that compiled code opens, only those of
    `torch.save` are checked.
    """

    folder: Path
    home: Path
    log: Path
    writes_elsewhere: bool = False

    @contextlib.contextmanager
    def made(self) -> Iterator[Path]:
        """A working folder for one run, which is removed afterwards."""
        own = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            _mirror(self.home, own, _MOST_DEPTH)
            yield own
        finally:
            shutil.rmtree(own, ignore_errors=True)

    @contextlib.contextmanager
    def inside(self, own: Path) -> Iterator[None]:
        before = Path.cwd()
        with self.log.open("a", buffering=1) as log, contextlib.redirect_stdout(log):
            os.chdir(own)
            try:
                with contextlib.nullcontext() if self.writes_elsewhere else _guarded(own):
                    yield
            finally:
                os.chdir(before)


@dataclass(frozen=True)
class Confined:
    """A loop for worker processes, which work in `own`, one of the folders of `scratch`."""

    loop: Callable[[], Any]
    scratch: Scratch
    own: Path

    def __call__(self) -> Any:
        with self.scratch.inside(self.own):
            return self.loop()

    @property
    def __name__(self) -> str:
        return getattr(self.loop, "__name__", "train")


def _mirror(home: Path, own: Path, depth: int) -> None:
    with os.scandir(home) as entries:
        for entry in list(entries):
            place = own / entry.name
            if not depth or entry.name in _WHOLE or not entry.is_dir(follow_symlinks=False) or _is_large(entry.path):
                place.symlink_to(entry.path)
            else:
                place.mkdir()
                _mirror(Path(entry.path), place, depth - 1)


def _is_large(folder: str) -> bool:
    try:
        return sum(1 for _ in Path(folder).iterdir()) > _MOST_ENTRIES
    except OSError:
        return True


_own: Path | None = None  # the folder that may be written to, while a loop runs
_is_installed = False


@contextlib.contextmanager
def _guarded(own: Path) -> Iterator[None]:
    """Rejects writes outside `own`. An audit hook cannot be removed: it is installed once, and does nothing elsewhere."""
    global _own, _is_installed
    if not _is_installed:
        sys.addaudithook(_on_event)
        _is_installed = True
    before, save = _own, torch.save

    @functools.wraps(save)
    def checked(obj: object, f: Any, *more: Any, **options: Any) -> None:
        if isinstance(f, str | os.PathLike):
            _check(os.fspath(f), _WRITES)
        save(obj, f, *more, **options)

    _own, torch.save = own.resolve(), checked  # `torch.save` opens files in C++, which audit hooks do not see
    try:
        yield
    finally:
        _own, torch.save = before, save


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if _own is None:
        return
    if event == "open":
        if isinstance(args[2], int) and args[2] & _WRITES:
            _check(args[0], args[2])
    elif event in _PATHS:
        for path in args[: _PATHS[event]]:
            _check(path, 0)


def _check(path: Any, flags: int) -> None:
    """Allows a write to a path, and replaces a link there by a copy; `flags` of `open`, or 0 if the link itself changes."""
    if _own is None or not isinstance(path, str | bytes):  # a descriptor was checked when it was opened
        return
    named = Path.cwd() / os.fsdecode(path)
    place = named.parent.resolve() / named.name
    if not _may(place):
        raise WritesElsewhereError(
            f"The loop writes {place}, which is outside the scratch folder, so short runs would overwrite it: allow that "
            "with --yes, or use a path relative to the working folder."
        )
    if flags and place.is_symlink() and not _may(target := place.resolve()):
        place.unlink()
        if not flags & os.O_TRUNC and target.exists():
            shutil.copyfile(target, place)


def _may(place: Path) -> bool:
    assert _own is not None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    free = (_own, *map(Path, _FREE), Path(tempfile.gettempdir()).resolve(), cache.resolve())
    return "__pycache__" in place.parts or any(place.is_relative_to(one) for one in free)
