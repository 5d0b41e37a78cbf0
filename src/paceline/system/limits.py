"""What the system or a container grants this process: cores, memory, a folder for temporary files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import UsageError

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_SYSTEM = Path("/proc/meminfo")
_UNLIMITED = 2**60  # bytes; version 1 writes a number near 2^63


def temporary_folder() -> str:
    """Where temporary files go; refuses a system without such a folder."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise UsageError(
            "No folder for temporary files can be written, such as /tmp: name one in the environment variable TMPDIR."
        ) from None


def cpu_quota() -> float | None:
    """How many cores' time a control group grants; None: no limit."""
    found = [words for text in _settings("cpu", "cpu.max") if (words := text.split())[0] != "max"]
    quotas = [int(quota) / int(period) for quota, period in found]
    for quota, period in zip(_settings("cpu", "cpu.cfs_quota_us"), _settings("cpu", "cpu.cfs_period_us"), strict=False):
        if int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit() -> int | None:
    """Bytes of memory that a control group grants; None: no limit."""
    names = "memory.max", "memory.limit_in_bytes"
    limits = [int(text) for name in names for text in _settings("memory", name) if text != "max"]
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


def system_memory() -> dict[str, int]:
    """The system's memory in bytes, by Linux's names, such as `MemTotal`; empty on other systems."""
    lines = _SYSTEM.read_text().splitlines() if _SYSTEM.is_file() else []
    return {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith(" kB")}


def _settings(controller: str, name: str) -> Iterator[str]:
    """A setting of this process's control group and of the groups around it, under cgroups of version 1 or 2."""
    lines = _OWN_CGROUPS.read_text().splitlines() if _OWN_CGROUPS.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers  # of version 2, whose list of controllers is empty
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if (file := folder / name).is_file():
                yield file.read_text().strip()
            if folder == root:
                break
