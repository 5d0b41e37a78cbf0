"""What a shard has told the run's result of its decisions, so that each is told once."""

from __future__ import annotations

from paceline.algorithms.server.admission import Admission
from paceline.ports.shared import ServedParameters

__all__ = ["Told"]


class Told:
    """What has been told.

    Attributes:
        counted: of the admission: `backups` of the last step, and `incomplete` updates.
    """

    def __init__(self) -> None:
        self.counted = {"backups": 0, "incomplete": 0}

    def count(self, admission: Admission, shared: ServedParameters) -> dict[str, int]:
        """Tells what the admission has changed; returns that."""
        changed = {name: getattr(admission, name) for name in self.counted}
        changed = {name: now for name, now in changed.items() if now != self.counted[name]}
        for name, now in changed.items():
            shared.count(name, now - self.counted[name])
        self.counted |= changed
        return changed
