"""How far others, also those beyond a virtual machine, take the cores away from what `foresight.py` measures."""

from __future__ import annotations

import os
from pathlib import Path


class Watch:
    """How much of the machine's cores others use, from now on; Linux. "Others" are those of another session."""

    def __init__(self) -> None:
        self._ticks, self._own, self._idle = self._now()

    def others_share(self) -> float:
        """Of the cores' time since the beginning."""
        ticks, own, idle = self._now()
        total = ticks - self._ticks
        return max(0.0, total - (idle - self._idle) - (own - self._own)) / max(1, total)

    @staticmethod
    def _now() -> tuple[int, int, int]:
        fields = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        own, session = 0, os.getsid(0)
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = file.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if int(words[3]) == session:
                own += sum(map(int, words[11:15]))  # its own time, and that of its children that have ended
        return sum(fields), own, fields[3] + fields[4]
