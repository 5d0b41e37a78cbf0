"""Graph cuts: node labels such that few heavy edges join different labels, learned by Hogwild!.

    minimise  sum over edges of w_uv ||x_u - x_v||_1,  each x_v in the simplex of labels, some x_v given

One update takes one edge: x_u and x_v move towards each other by `eta w` in every label, and are projected back onto
the simplex. An edge conflicts only with other edges of its two nodes, so in large graphs conflicts are rare.

Reference: Niu, Recht, Ré, Wright, "Hogwild!", 2011, arXiv:1106.5730, section 2 and appendix.
"""

from __future__ import annotations

import time

import numpy as np

from paceline.errors import UsageError
from paceline.memory.atomics import fetch_add, load
from paceline.sparse.instructions import compiled
from paceline.sparse.linear import Pass
from paceline.sparse.team import Team, shuffle

U = np.uint64
CHUNK = 256


@compiled
def project(x: np.ndarray, node: int) -> None:
    """Projects a node's row onto the simplex: subtracts a constant, and clips at zero (Michelot)."""
    labels = x.shape[1]
    total, count = 0.0, labels
    for label in range(labels):
        total += x[node, label]
    while True:
        lowered = (total - 1.0) / count
        total, left = 0.0, 0
        for label in range(labels):
            if x[node, label] > lowered:
                total += x[node, label]
                left += 1
        # The set shrinks each time: rounding, or another thread that writes here, could otherwise make this loop endless.
        if left == 0 or left >= count:
            break
        count = left
    for label in range(labels):
        x[node, label] = max(0.0, x[node, label] - lowered)


@compiled
def project_all(x: np.ndarray) -> None:
    """Projects every row: two threads that wrote one row at once may have left parts of both."""
    for node in range(x.shape[0]):
        project(x, U(node))


@compiled
def cut(
    edges: np.ndarray,
    weights: np.ndarray,
    order: np.ndarray,
    x: np.ndarray,
    given: np.ndarray,
    eta: float,
    clock: int,
    report: np.ndarray,
) -> None:
    """One thread's part of a pass; adds the sum of losses, edges, and edges that others claimed meanwhile to `report`."""
    while True:
        chunk = fetch_add(clock, 1)
        start = chunk * CHUNK
        if start >= order.size:
            break
        stop = min(start + CHUNK, order.size)
        for position in range(start, stop):
            edge = U(order[U(position)])
            u, v = U(edges[edge, 0]), U(edges[edge, 1])
            step = eta * weights[edge]
            for label in range(x.shape[1]):
                apart = x[u, label] - x[v, label]
                report[0] += weights[edge] * abs(apart)
                move = step if apart > 0.0 else (-step if apart < 0.0 else 0.0)
                if not given[u]:
                    x[u, label] -= move
                if not given[v]:
                    x[v, label] += move
            if not given[u]:
                project(x, u)
            if not given[v]:
                project(x, v)
        report[1] += stop - start
        report[2] += (load(clock) - chunk - 1) * CHUNK


class GraphCut:
    """Passes over the edges of a graph.

    Args:
        edges: (edges, 2), node numbers.
        weights: one per edge, above 0.
        labels: number of labels.
        given: of nodes with a known label: node to label.
        team: the threads.
        nodes: number of nodes; by default as many as the edges use.
        seed: of the order.

    Attributes:
        x: (nodes, labels), each row in the simplex between passes.
    """

    def __init__(
        self,
        edges: np.ndarray,
        weights: np.ndarray,
        labels: int,
        given: dict[int, int],
        team: Team,
        *,
        nodes: int | None = None,
        seed: int = 0,
    ) -> None:
        self._edges = np.ascontiguousarray(edges, np.int64)
        self._weights = np.ascontiguousarray(weights, np.float64)
        count = int(self._edges.max(initial=-1)) + 1 if nodes is None else nodes
        if self._edges.ndim != 2 or self._edges.shape[1] != 2 or len(self._weights) != len(self._edges):
            raise UsageError("Edges must be pairs of node numbers, with one weight each.")
        if self._edges.min(initial=0) < 0 or self._edges.max(initial=0) >= count:
            raise UsageError(f"Edges must join nodes from 0 to {count - 1}.")
        if not (np.isfinite(self._weights).all() and (self._weights > 0).all()):
            raise UsageError("Weights of edges must be above 0 and finite.")
        if labels < 2 or not all(0 <= node < count and 0 <= label < labels for node, label in given.items()):
            raise UsageError(
                f"A cut needs 2 labels or more, and given must map nodes below {count} to labels below {labels}."
            )
        self.x = np.full((count, labels), 1 / labels)
        self._given = np.zeros(count, np.bool_)
        for node, label in given.items():
            self._given[node] = True
            self.x[node] = 0.0
            self.x[node, label] = 1.0
        self._order = np.arange(len(self._edges), dtype=np.int64)
        self._team, self._seed = team, seed
        self.passes: list[Pass] = []

    def make_pass(self, eta: float) -> Pass:
        """Visits every edge once; the loss is the mean over the edges during the pass."""
        began_s = time.perf_counter()
        shuffle(self._order, self._seed * 1_000_003 + len(self.passes))
        report = np.zeros((self._team.threads, 8))
        self._team.run(
            lambda thread: cut(
                self._edges, self._weights, self._order, self.x, self._given, eta, self._team.clock, report[thread]
            )
        )
        project_all(self.x)
        total, edges, others = report.sum(axis=0)[:3]
        self.passes.append(Pass(total / edges, time.perf_counter() - began_s, int(edges), others / edges, 0))
        return self.passes[-1]

    def objective(self) -> float:
        """Weight of the cut: sum of w ||x_u - x_v||_1 over the edges."""
        return float(self._weights @ np.abs(self.x[self._edges[:, 0]] - self.x[self._edges[:, 1]]).sum(axis=1))
