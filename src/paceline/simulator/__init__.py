"""The same worker programs under a virtual clock: gradients are computed for real, only time is simulated."""

from __future__ import annotations

from paceline.simulator.cluster import Cluster
from paceline.simulator.compute import Constant, ExponentialTail, Normal, Pareto, Recorded
from paceline.simulator.faults import Faults
from paceline.simulator.hardware.sockets import Sockets

__all__ = ["Cluster", "Constant", "ExponentialTail", "Faults", "Normal", "Pareto", "Recorded", "Sockets"]
