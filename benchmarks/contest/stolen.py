"""How much of a virtual machine's time its host gives to others."""

from __future__ import annotations

from pathlib import Path

STOLEN = 7  # among the first line's figures: user, nice, system, idle, iowait, irq, softirq, steal


class Stolen:
    """Counts from now on; on Linux, elsewhere nothing is known to be stolen.

    Args:
        file: `/proc/stat`, in clock ticks.
    """

    def __init__(self, file: Path = Path("/proc/stat")) -> None:
        self._file = file
        self._before = self._ticks()

    def share(self) -> float:
        """Of the time of all cores since the beginning: what programs here wanted and the host gave to others; 0 to 1."""
        stolen, total = (now - before for now, before in zip(self._ticks(), self._before, strict=True))
        return stolen / total if total else 0.0

    def _ticks(self) -> tuple[int, int]:
        if not self._file.exists():
            return 0, 0
        ticks = [int(word) for word in self._file.read_text().split("\n", 1)[0].split()[1:9]]
        return ticks[STOLEN], sum(ticks)
