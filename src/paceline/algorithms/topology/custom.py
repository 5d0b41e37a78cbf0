"""A user-defined graph: from NetworkX, from a list of edges, or from a spec."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.algorithms.topology.graph import Topology
from paceline.errors import UsageError

_LINKS = re.compile(r"[0-9]+-[0-9]+(_[0-9]+-[0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class Custom(Topology):
    """Any connected undirected graph, for exactly as many workers as it has nodes.

    Costs per step: as many messages sent and received per worker as its node has edges.
    Use when: the network is known, such as fast links inside a rack and one slow link between racks.

    Build it with `Custom.of(graph)`. The graph is kept as text, so that specs, logs and configurations can hold it.

    Args:
        links: the edges as "0-1_1-2_2-3"; nodes are worker ids.

    Raises:
        UsageError: no edges, a worker joined to itself, or workers that the others cannot reach.

    >>> Custom(links="2-1_1-0").neighbours(1, num_workers=3)
    (0, 2)
    """

    links: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _LINKS.fullmatch(self.links):
            raise UsageError(f"A graph must be edges between worker ids, such as 0-1_1-2, not '{self.links[:80]}'.")
        pairs = [link.split("-") for link in self.links.split("_")]
        edges = sorted({(min(pair), max(pair)) for pair in ((int(one), int(other)) for one, other in pairs)})
        for one, other in edges:
            if one == other:
                raise UsageError(
                    f"The graph joins worker {one} to itself: remove that edge. Every worker keeps part of its own model."
                )
        _check_connected(edges)
        object.__setattr__(self, "links", "_".join(f"{one}-{other}" for one, other in edges))

    @classmethod
    def of(cls, graph: Any) -> Custom:
        """The topology of a NetworkX graph (or one with the same `nodes`, `edges()`, `is_directed()`) or of a list of edges.

        Nodes are the worker ids 0 to num_workers - 1. Edge weights are ignored: they are not mixing weights.

        >>> Custom.of([(0, 1), (1, 2), (2, 0)])
        Custom(links='0-1_0-2_1-2')

        Raises:
            UsageError: directed, not connected, or other nodes than 0 to num_workers - 1.
        """
        is_graph = hasattr(graph, "nodes") and callable(getattr(graph, "edges", None))
        if is_graph and graph.is_directed():
            raise UsageError(
                "A directed graph may have no doubly stochastic mixing matrix: use graph.to_undirected(), or "
                "topology=exponential, which is directed and has one."
            )
        edges = [_worker_ids(edge) for edge in (graph.edges() if is_graph else graph)]
        if not edges:
            raise UsageError(
                "The graph has no edges: give at least one, or train with one worker and another topology."
            )
        if is_graph:
            _check_nodes(graph.nodes)
            joined = {worker for edge in edges for worker in edge}
            alone = sorted(set(graph.nodes) - joined)
            if alone:
                raise UsageError(f"The graph is not connected: no edge reaches worker {alone[0]}; add one.")
        return cls(links="_".join(f"{one}-{other}" for one, other in edges))

    @property
    def num_nodes(self) -> int:
        return len(self._neighbours)

    def neighbours(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        return self._neighbours[worker_id]

    def check(self, num_workers: int) -> None:
        super().check(num_workers)
        if num_workers != self.num_nodes:
            raise UsageError(
                f"The graph has {self.num_nodes} nodes and cannot join {num_workers} workers: "
                f"use {self.num_nodes} workers or another graph."
            )

    @cached_property
    def _neighbours(self) -> tuple[tuple[int, ...], ...]:
        edges = [link.split("-") for link in self.links.split("_")]
        return tuple(map(tuple, _adjacency([(int(one), int(other)) for one, other in edges])))


def _worker_ids(edge: Iterable[Any]) -> tuple[int, int]:
    try:
        one, other = (operator.index(node) for node in edge)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"Edge {edge!r} does not join two worker ids: relabel the nodes, for example with "
            "networkx.convert_node_labels_to_integers(graph)."
        ) from error
    if one < 0 or other < 0:
        raise UsageError(f"Worker ids start at 0, but edge {edge!r} has a negative one: relabel the nodes.")
    return one, other


def _check_nodes(nodes: Iterable[Any]) -> None:
    labels = set(nodes)
    if labels != set(range(len(labels))):
        raise UsageError(
            f"The graph's {len(labels)} nodes must be the worker ids 0 to {len(labels) - 1}: relabel them with "
            "networkx.convert_node_labels_to_integers(graph)."
        )


def _adjacency(edges: list[tuple[int, int]]) -> list[list[int]]:
    neighbours: list[list[int]] = [[] for _ in range(max(other for _, other in edges) + 1)]
    for one, other in edges:
        neighbours[one].append(other)
        neighbours[other].append(one)
    return [sorted(one) for one in neighbours]


def _check_connected(edges: list[tuple[int, int]]) -> None:
    num_nodes = max(other for _, other in edges) + 1
    if num_nodes > len(edges) + 1:  # before anything of that size is made: an id may be mistyped
        joined = {worker for edge in edges for worker in edge}
        alone = next((worker for worker in range(num_nodes) if worker not in joined), None)
        missing = f"no edge reaches worker {alone}" if alone is not None else "it has too few edges"
        raise UsageError(f"The graph is not connected: {missing}, but the ids go up to {num_nodes - 1}; add edges.")
    neighbours = _adjacency(edges)
    reached, waiting = {0}, [0]
    while waiting:
        new = set(neighbours[waiting.pop()]) - reached
        reached |= new
        waiting += new
    if len(reached) < num_nodes:
        other = min(set(range(num_nodes)) - reached)
        raise UsageError(
            f"The graph is not connected: worker {other} cannot be reached from worker 0, and they would never agree; "
            "add an edge."
        )
