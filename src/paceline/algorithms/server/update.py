"""Where a gradient comes from, and how old it is."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.optim.flat import Ranges

__all__ = ["COUNTED", "DROPPED", "UpdateInfo"]

# In place of the version that an update became:
DROPPED = -1
COUNTED = 0  # part of a later update; its worker goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateInfo:
    """A gradient's source and age."""

    worker_id: int  # the worker that computed it
    sequence: int  # the worker's own count of its gradients; a repeated number marks a duplicate
    step: int  # the step that the gradient was computed for, as stamped by the worker
    version_read: int  # version of the parameters that it was computed at
    version: int  # version of the parameters now, before it is applied
    num_samples: int  # samples that it is the mean over
    missing: Ranges = ()  # elements of the shard that belong to parameters without a gradient, which make no step

    @property
    def staleness(self) -> int:
        """Updates applied since the parameters were read."""
        return self.version - self.version_read
