"""How fast neighbours that average agree, from the matrices of their weights, and measured by running them.

Symbols: n workers, W the mixing matrix (n, n), x the workers' values (n,). One step of averaging is x <- W x. W is doubly
stochastic: its rows sum to 1, so that workers which agree stay unchanged, and its columns sum to 1, so that the mean of all
workers never changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.algorithms.topology import Topology, metropolis_weights

Matrix = NDArray[np.float64]


def mixing_matrix(topology: Topology, num_workers: int, step: int = 0) -> Matrix:
    """The mixing matrix W (num_workers, num_workers) at one step; row i holds worker i's weights.

    Raises:
        UsageError: the topology does not exist at this size.

    >>> from paceline.algorithms.topology import Star
    >>> mixing_matrix(Star(), num_workers=2)
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """
    topology.check(num_workers)
    W = np.zeros((num_workers, num_workers))
    for worker_id in range(num_workers):
        for other, weight in metropolis_weights(topology, worker_id, num_workers, step).items():
            W[worker_id, other] = weight
    return W


def period_matrix(topology: Topology, num_workers: int) -> Matrix:
    """The mixing matrix of one whole period of a time-varying topology: the product of its matrices, first step rightmost."""
    product = np.eye(num_workers)
    for step in range(topology.period(num_workers)):
        product = mixing_matrix(topology, num_workers, step) @ product
    return product


def pair_matrix(num_workers: int, one: int, other: int) -> Matrix:
    """The mixing matrix of one pair-average: both take the mean of their two values, all others keep theirs."""
    W = np.eye(num_workers)
    W[np.ix_([one, other], [one, other])] = 1.0 if one == other else 0.5
    return W


def check_doubly_stochastic(W: Matrix, *, tolerance: float = 1e-9) -> None:
    """Refuse a matrix whose averaging would change the mean of the workers or never settle.

    Raises:
        ValueError: not square, a negative weight, or a row or column that does not sum to 1; the message names it.
    """
    if W.ndim != 2 or W.shape[0] != W.shape[1]:
        raise ValueError(f"A mixing matrix has one row and one column per worker, not the shape {W.shape}.")
    if not W.min() >= -tolerance:  # also refuses NaN
        row, column = np.unravel_index(np.argmin(W), W.shape)
        raise ValueError(f"Mixing weights cannot be negative: row {row}, column {column} is {W[row, column]:.6g}.")
    for axis, name in ((1, "Row"), (0, "Column")):
        sums = W.sum(axis=axis)
        worst = int(np.argmax(np.abs(sums - 1)))
        if abs(sums[worst] - 1) > tolerance:
            raise ValueError(
                f"{name} {worst} of the mixing matrix sums to {sums[worst]:.6g}, not 1; Metropolis weights always do on an "
                "undirected graph."
            )


def spectral_gap(W: Matrix) -> float:
    """1 - max(|lambda_2|, |lambda_n|) of a mixing matrix: the share of the slowest disagreement that one step removes.

    1 means that one step reaches the average, 0 that the workers never agree. D-PSGD on a graph with a larger gap behaves more
    like all-reduce. Costs n^3 operations. For a time-varying topology give `period_matrix`: the gap is then per period.
    """
    check_doubly_stochastic(W)
    eigenvalues = np.linalg.eigvalsh(W) if np.array_equal(W, W.T) else np.linalg.eigvals(W)
    magnitudes = np.sort(np.abs(eigenvalues))  # the largest is 1: agreement
    return float(1.0 - magnitudes[-2]) if len(magnitudes) > 1 else 1.0


def pair_probabilities(topology: Topology, num_workers: int) -> Matrix:
    """P[i, j] = probability that the next pair-average is started by worker i with worker j.

    The initiator is uniformly random, then its partner; for a time-varying topology also the step.
    """
    topology.check(num_workers)
    period = topology.period(num_workers)
    P = np.zeros((num_workers, num_workers))
    for step in range(period):
        for worker_id in range(num_workers):
            partners = topology.partners(worker_id, num_workers, step)
            for other in partners:
                P[worker_id, other] += 1.0 / (num_workers * period * len(partners))
    return P


def expected_contraction(topology: Topology, num_workers: int) -> float:
    """1 - rho, where rho is the second-largest eigenvalue of E[W^T W] over random pair-averages (`pair_probabilities`).

    One pair-average of AD-PSGD multiplies the expected squared distance of the workers from their mean by at most rho.
    Multiplied by num_workers it is the contraction per as many updates as there are workers, which compares graphs of
    different sizes. Costs n^3 operations.

    >>> from paceline.algorithms.topology import Complete
    >>> round(4 * expected_contraction(Complete(), num_workers=4), 3)
    1.333
    """
    if num_workers == 1:
        return 1.0
    return float(1.0 - np.linalg.eigvalsh(_expected_pair_matrix(topology, num_workers))[-2])


def run_pairwise_averaging(topology: Topology, values: Matrix, num_updates: int, random: np.random.Generator) -> Matrix:
    """Run random pair-averages and return the resulting values: measures what `expected_contraction` predicts.

    Each update draws an initiator, then one of its partners, and replaces both values by their mean; a time-varying topology
    moves one step per update.

    Args:
        topology: which workers may average with each other.
        values: (num_runs, num_workers); every run draws its own pairs. Not changed.
        num_updates: pair-averages per run.
        random: NumPy's generator, seeded by the caller.
    """
    x = np.array(values, dtype=np.float64)
    num_runs, num_workers = x.shape
    topology.check(num_workers)
    if num_workers == 1:
        return x
    run = np.arange(num_runs)
    tables = [_partner_table(topology, num_workers, step) for step in range(topology.period(num_workers))]
    for update in range(num_updates):
        partners, degrees = tables[update % len(tables)]
        i = random.integers(num_workers, size=num_runs)
        j = partners[i, random.integers(degrees[i])]
        x[run, i] = x[run, j] = (x[run, i] + x[run, j]) / 2
    return x


class MeasuredContraction(NamedTuple):
    """The measured remainder of the slowest disagreement; its expectation is rho^num_updates."""

    remaining: float
    standard_error: float


def measure_contraction(
    topology: Topology, num_workers: int, *, num_updates: int, num_runs: int, seed: int
) -> MeasuredContraction:
    """Measure the contraction of random pair-averages by running them from the slowest disagreement.

    Every run starts at v, the unit vector that E[W^T W] shrinks least, and <v, x> is read at its end. A pair-average is a
    projection (W^T W = W), so that E[x] = E[W]^k v and the expectation is exactly rho^k. The squared distance from the mean
    has no such exact value after more than one update: rho^k only bounds it. Only the start is computed from the matrix: if
    the matrix were wrong, the runs would not shrink at its rate.

    Costs num_runs * num_workers numbers of memory and num_runs * num_updates pair-averages.

    Args:
        topology: which workers may average with each other; fixed, not time-varying.
        num_workers: at least 2.
        num_updates: pair-averages per run, k.
        num_runs: independent runs, at least 2; the standard error falls with their square root.
        seed: of the draws.

    Raises:
        ValueError: time-varying, or fewer than 2 workers or runs.
    """
    if num_workers < 2 or num_runs < 2 or topology.period(num_workers) > 1:
        raise ValueError("Contraction is measured on a fixed topology with at least 2 workers, in at least 2 runs.")
    v = np.linalg.eigh(_expected_pair_matrix(topology, num_workers))[1][:, -2]
    start = np.broadcast_to(v, (num_runs, num_workers))
    remaining = run_pairwise_averaging(topology, start, num_updates, np.random.default_rng(seed)) @ v
    return MeasuredContraction(float(remaining.mean()), float(remaining.std(ddof=1) / num_runs**0.5))


def _expected_pair_matrix(topology: Topology, num_workers: int) -> Matrix:
    """E[W^T W] of random pair-averages. Each W is a projection, so that W^T W = W = I - (e_i - e_j)(e_i - e_j)^T / 2."""
    P = pair_probabilities(topology, num_workers)
    S = P + P.T
    return np.eye(num_workers) - (np.diag(S.sum(axis=1)) - S) / 2


def _partner_table(topology: Topology, num_workers: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Partners of every worker (num_workers, largest degree), padded with 0, and how many there are (num_workers,)."""
    partners = [topology.partners(worker_id, num_workers, step) for worker_id in range(num_workers)]
    degrees = np.array([len(one) for one in partners])
    table = np.zeros((num_workers, degrees.max()), dtype=np.int64)
    for worker_id, one in enumerate(partners):
        table[worker_id, : len(one)] = one
    return table, degrees
