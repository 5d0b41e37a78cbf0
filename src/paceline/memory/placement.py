"""Specs of where shared parameters lie in a machine with several memory nodes, and where workers run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.errors import UsageError
from paceline.memory import numa
from paceline.memory.segment import Segment
from paceline.specs.bounds import COUNT_FROM_0
from paceline.specs.registry import Registry
from paceline.specs.types import check_fields


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A policy for the run's memory, and whether each worker is pinned to a core.

    Args:
        pin: give every worker its own core, round robin over the cores that this process may use.
    """

    pin: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self) -> None:
        """Raises a `UsageError` if this machine lacks something that the algorithm needs; by default does nothing."""

    def place(self, segment: Segment) -> str:
        """Applies the policy to untouched memory; returns a sentence on what it did, or an empty string."""
        return ""


@dataclass(frozen=True, kw_only=True)
class FirstTouch(Placement):
    """The kernel's default: a page lies on the node of the worker that first writes it."""


@dataclass(frozen=True, kw_only=True)
class Interleave(Placement):
    """Pages alternate over all nodes: every worker is equally far from the parameters on average."""

    def place(self, segment: Segment) -> str:
        return numa.interleave(segment.address, segment.size_bytes)


@dataclass(frozen=True, kw_only=True)
class Bind(Placement):
    """All pages on one node.

    Args:
        node: its number.
    """

    node: Annotated[int, COUNT_FROM_0] = 0

    def check(self) -> None:
        known = [node.id for node in numa.numa_nodes()]
        if self.node not in known:
            raise UsageError(f"This machine has no memory node {self.node}; it has {', '.join(map(str, known))}.")

    def place(self, segment: Segment) -> str:
        return numa.bind(segment.address, segment.size_bytes, [self.node])


placement_registry = Registry("placement")
placement_registry.register("first-touch", FirstTouch)
placement_registry.register("interleave", Interleave)
placement_registry.register("bind", Bind)
