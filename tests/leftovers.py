"""What a run may leave behind in a process and on the machine: looked at before and after each test with real workers."""

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import threading
import time
from pathlib import Path

import pytest

import forked

DEADLINE_S = 60.0  # what is left is there for good


def start_fork_server():
    """It lives as long as the tests do, as in a user's program, so it counts as no leftover.

    In Python 3.11 a fork server has no `sys.path` of its parent, and skips modules that it does not find without a word.
    """
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        process.start()
    process.join()
    process.close()
    multiprocessing.resource_tracker.ensure_running()
    gc.collect()
    gc.freeze()  # what is loaded by now stays: a collection after a test then takes a millisecond, not 300


def parents():
    """Process id -> parent's id, of everything alive (zombies have ended)."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it ended while we looked
                continue
            if state != "Z":
                found[int(folder.name)] = int(parent)
    return found


def descendants(pid):
    parent_of = parents()
    found, fresh = set(), {pid}
    while fresh:
        fresh = {one for one, parent in parent_of.items() if parent in fresh} - found
        found |= fresh
    return found


def alive(pid):
    return pid in parents()


def _links(folder):
    found = set()
    for path in Path(folder).iterdir():
        try:
            found.add((path.name, str(path.readlink())))
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def _shared_memory():
    """Not the file that PyTorch makes and removes at once for a tensor of a loader: a kill between the two leaves it."""
    return {path.name for path in Path("/dev/shm").iterdir() if not re.search(r"chromium|^torch_\d+_", path.name)}


def everything():
    return {
        "processes": descendants(os.getpid()),
        "threads": {thread.name for thread in threading.enumerate()},
        "file descriptors": _links("/proc/self/fd"),
        "shared memory": _shared_memory(),
    }


def new_since(before):
    after = everything()
    return {kind: after[kind] - before[kind] for kind in before if after[kind] - before[kind]}


def assert_nothing_new(before):
    """Waits a moment for the fork server to reap its children, then tells what is there that was not."""
    until_s = time.monotonic() + DEADLINE_S
    while (left := new_since(before)) and time.monotonic() < until_s:
        gc.collect()
        time.sleep(0.02)
    assert not left, "\n".join(f"{kind}: {sorted(what)}" for kind, what in left.items())


def wait_until(condition, what, deadline_s=forked.AGAINST_HANGS_S):
    """Polls something that this process cannot be told about: another process's end, a file."""
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.01)


def cpu_s(pid):
    """Seconds of a core that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
