"""Mixing weights of neighbours: workers' shares of each other's values in one step of averaging."""

from __future__ import annotations

from paceline.algorithms.topology.graph import Topology


def metropolis_weights(topology: Topology, worker_id: int, num_workers: int, step: int = 0) -> dict[int, float]:
    """One worker's row of the Metropolis-Hastings mixing matrix: 1 / (1 + the larger degree of the two) per neighbour.

    Doubly stochastic on every topology here, and symmetric on the undirected ones. Reads only the neighbours and never builds
    the whole matrix.

    Returns:
        the weight of every neighbour and, last, of the worker itself; they sum to 1.

    >>> from paceline.algorithms.topology import Star
    >>> metropolis_weights(Star(), worker_id=1, num_workers=4)
    {0: 0.25, 1: 0.75}
    """
    neighbours = topology.neighbours(worker_id, num_workers, step)
    degrees = {other: len(topology.neighbours(other, num_workers, step)) for other in neighbours}
    weights = {other: 1.0 / (1 + max(len(neighbours), degree)) for other, degree in degrees.items()}
    return {**weights, worker_id: 1.0 - sum(weights.values())}
