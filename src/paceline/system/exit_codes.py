"""How a process ended, in words."""

from __future__ import annotations

import signal
from pathlib import Path

_COUNTERS = Path("/proc/vmstat")


def how_ended(code: int | None) -> str:
    """A process's exit code in words; None: unknown, or a thread."""
    global _memory_kills
    if code is None:
        return "ended without a word"
    if code >= 0:
        return f"ended with exit code {code}"
    before, _memory_kills = _memory_kills, _count_memory_kills()
    if code == -signal.SIGKILL and _memory_kills > before:
        return f"was ended by signal {-code}, as the system kills processes for lack of memory (see paceline doctor)"
    return f"was ended by signal {-code}"


def _count_memory_kills() -> int:
    """How many processes the system has killed for lack of memory since it booted, in containers, too."""
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


_memory_kills = _count_memory_kills()  # those before the last death
