"""The admission's counts that a shard has already reported to the run's result."""

from __future__ import annotations

from paceline.algorithms.server.admission import Admission
from paceline.ports.shared import ServedParameters

__all__ = ["ReportedCounts"]


class ReportedCounts:
    """The reported counts.

    Attributes:
        counted: `backups` of the last step, and `incomplete` updates, as last reported.
    """

    def __init__(self) -> None:
        self.counted = {"backups": 0, "incomplete": 0}

    def count(self, admission: Admission, shared: ServedParameters) -> dict[str, int]:
        """Reports the admission's changed counts; returns them."""
        changed = {name: getattr(admission, name) for name in self.counted}
        changed = {name: now for name, now in changed.items() if now != self.counted[name]}
        for name, now in changed.items():
            shared.count(name, now - self.counted[name])
        self.counted |= changed
        return changed
