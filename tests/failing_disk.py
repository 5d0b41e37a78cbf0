"""A disk that fails at a chosen moment: every change that Paceline makes to files is counted here, and may be refused."""

import contextlib
import errno
import os
import pathlib
import threading
import zlib

from paceline.system import files

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
STEPS = ("open", "write", "fsync", "replace")  # by which a file comes to be


class Disk:
    """Refuses changes from the first of a kind on, with one of `ERRORS`.

    Args:
        at: step and name of the file at which it begins; None: it refuses nothing.
        number: how many it refuses.
        thorough: whether all steps of every file count; else one of each, by its name, but all of a spool's, which are few.

    Attributes:
        seen: what was asked for, each once, in its order.
        refused: whether something was.
    """

    def __init__(self, at=None, number=10**9, *, thorough=False):
        self.at, self.left, self.thorough = at, number, thorough
        self.seen = []
        self.refused = False
        self._lock = threading.Lock()  # workers may be threads

    def change(self, step, name):
        """Something is to be changed."""
        chosen = STEPS[zlib.crc32(name.encode()) % len(STEPS)]
        if step in STEPS and not self.thorough and step != chosen and not name.endswith(".bin"):
            return
        with self._lock:
            if (step, name) not in self.seen:
                self.seen.append((step, name))
            self.refused = self.refused or (step, name) == self.at
            if not self.refused or not self.left:
                return
            self.left -= 1
            code = ERRORS[zlib.crc32(f"{self.at}".encode()) % len(ERRORS)]
        raise OSError(code, os.strerror(code), name)


class File:
    """An open file: its first write counts; on a full disk the others would fail as it does."""

    def __init__(self, file, disk, name):
        self._file, self._disk, self._name = file, disk, name
        self._counted = False

    def write(self, data):
        if not self._counted:
            self._counted = True
            self._disk.change("write", self._name)
        return self._file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)


@contextlib.contextmanager
def failing(monkeypatch, folder, disk):
    """Within, what lies in `folder` lies on this disk."""
    names = {}  # of open files, by descriptor
    new_file, write, fsync = files.new_file, os.write, os.fsync

    def final(path):
        """`.report.html.123.tmp` is on its way to `report.html`."""
        return path.name[1:].rsplit(".", 2)[0] if path.name.endswith(".tmp") else path.name

    def counted_new_file(path):
        disk.change("open", final(path))
        file = new_file(path)
        names[file.fileno()] = final(path)
        return File(file, disk, final(path))

    def counted_write(descriptor, data):
        if descriptor in names:  # a spool's
            disk.change("write", names[descriptor])
        return write(descriptor, data)

    def counted_fsync(descriptor):
        disk.change("fsync", names.get(descriptor, "folder"))
        return fsync(descriptor)

    def counted(step):
        original = getattr(pathlib.Path, step)

        def call(path, *arguments, **named):
            if folder in path.absolute().parents and (step != "mkdir" or not path.exists()):
                disk.change(step, final(path))
            return original(path, *arguments, **named)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(files, "new_file", counted_new_file)
        patched.setattr(os, "write", counted_write)
        patched.setattr(os, "fsync", counted_fsync)
        for step in ("replace", "rename", "mkdir"):
            patched.setattr(pathlib.Path, step, counted(step))
        yield disk


@contextlib.contextmanager
def full(monkeypatch, folder):
    """Within, nothing can be written into `folder`."""
    disk = Disk(thorough=True)
    disk.refused = True
    with failing(monkeypatch, folder, disk):
        yield


def every_moment(monkeypatch, folder, number=10**9, *, thorough=False):
    """A context for every kind of change: a disk that refuses none, then one that fails from the first on, and so on."""
    whole = Disk(thorough=thorough)
    yield lambda: failing(monkeypatch, folder, whole)
    for at in list(whole.seen):
        yield lambda at=at: failing(monkeypatch, folder, Disk(at, number, thorough=thorough))
