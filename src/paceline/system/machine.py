"""The environment of a measurement: machine, versions, garbage collection."""

from __future__ import annotations

import functools
import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("paceline", "torch", "numpy", "numba")


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory and system of this machine; no host name."""
    return {
        "processor": _processor(),
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def num_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    return {"python": platform.python_version(), **{package: _version(package) for package in _PACKAGES}}


@functools.cache  # read from files, and every run of a study names them
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Sets the number of threads inside one PyTorch operation for the duration of the `with`."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection inside the `with`, for code such as imports that makes many objects but no cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
