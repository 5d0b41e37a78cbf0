"""Communication graphs: workers average with their neighbours instead of all together.

A denser graph reaches agreement sooner and sends more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, NamedTuple

from paceline.errors import UsageError
from paceline.specs.bounds import COUNT
from paceline.specs.types import check_fields


class Roles(NamedTuple):
    """A split of the workers in which every edge joins an active and a passive one."""

    active: frozenset[int]
    passive: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A communication graph for any number of workers. Subclasses define `neighbours`.

    Every graph here is connected (a time-varying one over its period) and has a doubly stochastic mixing matrix. One worker is
    always possible and has no neighbours. Call `check` once; the other methods assume a valid size and valid ids.
    Each call of `neighbours`, `sends_to` or `partners` costs time and memory in the order of the worker's degree.
    """

    #: Whether edges have a direction, so that the mixing matrix is not symmetric.
    directed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    def neighbours(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        """The workers whose models `worker_id` mixes into its own at `step`, ascending, without itself."""
        raise TypeError(f"{type(self).__name__} must define neighbours")

    def sends_to(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        """The workers that mix the model of `worker_id` into theirs: its neighbours, unless the graph is directed."""
        return self.neighbours(worker_id, num_workers, step)

    def partners(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        """The workers with which `worker_id` may average pairwise: the graph without its directions."""
        if not self.directed:
            return self.neighbours(worker_id, num_workers, step)
        return _ascending(self.neighbours(worker_id, num_workers, step) + self.sends_to(worker_id, num_workers, step))

    def edges(self, num_workers: int, step: int = 0) -> tuple[tuple[int, int], ...]:
        """Every edge once, ascending: (smaller id, larger id), or (sender, reader) if the graph is directed."""
        pairs = ((there, here) for here in range(num_workers) for there in self.neighbours(here, num_workers, step))
        return tuple(sorted(pair for pair in pairs if self.directed or pair[0] < pair[1]))

    def period(self, num_workers: int) -> int:
        """The number of steps after which a time-varying graph repeats; 1 for a fixed one."""
        return 1

    def check(self, num_workers: int) -> None:
        """Refuse a number of workers for which this graph does not exist."""
        if num_workers < 1:
            raise UsageError(f"A topology needs at least 1 worker, not {num_workers}.")

    def caution(self, num_workers: int) -> str:
        """A sentence if another number of workers suits this graph better; empty otherwise."""
        return ""

    def bipartite_roles(self, num_workers: int) -> Roles | None:
        """A split into active and passive workers, worker 0 passive; None if some cycle has an odd length.

        If only active workers start an exchange and passive ones only answer, AD-PSGD cannot deadlock, without locks. The
        split holds at every step of a time-varying graph.

        Reference: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
            arXiv:1710.06952.
        """
        return _two_colouring(self, num_workers)


@dataclass(frozen=True, kw_only=True)
class Ring(Topology):
    """Each worker talks to the worker before and the worker after it.

    Costs per step: 2 messages sent and received per worker, independent of the number of workers.
    Use when: workers are few (up to about 16), or links join direct neighbours only.
    Not when: workers are many. The time to agree grows with their square.

    An even ring has bipartite roles, an odd one has none.

    >>> Ring().neighbours(0, num_workers=5)
    (1, 4)
    """

    def neighbours(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        return _at_distances(worker_id, num_workers, (-1, 1))


@dataclass(frozen=True, kw_only=True)
class BipartiteRing(Ring):
    """A ring that requires an even number of workers, so that its active and passive roles always exist.

    Use when: the run must not fall back to locks at an odd number of workers. Otherwise the same as `Ring`.
    """

    def check(self, num_workers: int) -> None:
        super().check(num_workers)
        _check_even("bipartite-ring", num_workers, instead="ring")


@dataclass(frozen=True, kw_only=True)
class Complete(Topology):
    """Every worker talks to every other.

    Costs per step: num_workers - 1 messages sent and received per worker; only 1 if averaging is pairwise.
    Use when: averaging is pairwise with a random partner and every pair of workers can connect, or workers are few.
    Not: an all-reduce, which computes the same average at the cost of about 2 messages.
    """

    def neighbours(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        return (*range(worker_id), *range(worker_id + 1, num_workers))


@dataclass(frozen=True, kw_only=True)
class Star(Topology):
    """Worker 0 talks to all others, which talk only to worker 0.

    Costs per step: num_workers - 1 messages sent and received at worker 0, 1 at the others.
    Use when: only one worker is reachable by the others, or as a control that shows the cost of a bottleneck.
    Not: a parameter server. Worker 0 trains and averages like the others.
    """

    def neighbours(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        return (0,) if worker_id else tuple(range(1, num_workers))


@dataclass(frozen=True, kw_only=True)
class Torus(Topology):
    """A grid of rows and columns whose edges wrap around; each worker talks to those above, below, left and right.

    Costs per step: 4 messages sent and received per worker (3 if there are 2 rows or 2 columns, 2 if both).
    Use when: the machines are wired as a grid, or a ring agrees too slowly and an exponential graph sends too far.

    Worker i sits in row i // columns, column i % columns.

    Args:
        rows: number of rows, at least 2; None: the divisor of num_workers nearest below its square root.

    >>> Torus().neighbours(0, num_workers=12)  # 3 rows, 4 columns
    (1, 3, 4, 8)
    """

    rows: Annotated[int, COUNT] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows is not None and self.rows < 2:
            raise UsageError(f"A torus needs at least 2 rows, not {self.rows}; for 1 row use topology=ring.")

    def neighbours(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        rows, columns = self.shape(num_workers)
        row, column = divmod(worker_id, columns)
        vertical = [(row + shift) % rows * columns + column for shift in (-1, 1)]
        horizontal = [row * columns + (column + shift) % columns for shift in (-1, 1)]
        return _ascending(one for one in vertical + horizontal if one != worker_id)

    def check(self, num_workers: int) -> None:
        super().check(num_workers)
        self.shape(num_workers)

    def shape(self, num_workers: int) -> tuple[int, int]:
        """Rows and columns.

        Raises:
            UsageError: the workers do not fill rows and columns of at least 2.
        """
        if num_workers == 1:
            return 1, 1
        rows = self.rows or _divisor_below_root(num_workers)
        columns, left_over = divmod(num_workers, rows)
        if rows >= 2 and columns >= 2 and not left_over:
            return rows, columns
        if self.rows is None:
            sizes = f"{num_workers - 1} or {num_workers + 1}" if num_workers > 4 else "4"
            raise UsageError(
                f"A torus cannot arrange {num_workers} workers, a prime number, in rows and columns of at least 2: "
                f"use {sizes} workers, or topology=ring."
            )
        sizes = f"{rows * columns} or {rows * (columns + 1)}" if columns >= 2 else f"{2 * rows}"
        raise UsageError(
            f"A torus cannot arrange {num_workers} workers in {rows} rows of equal length, at least 2: use {sizes} "
            f"workers, or another number of rows."
        )


@dataclass(frozen=True, kw_only=True)
class Exponential(Topology):
    """The static exponential-2 graph: each worker reads the models 1, 2, 4, 8, ... workers ahead. Directed.

    Costs per step: ceil(log2 num_workers) messages sent and received per worker.
    Use when: the averaging is in lockstep (D-PSGD) and workers are many: its spectral gap shrinks only with their logarithm,
    as 2 / (1 + ceil(log2 num_workers)) for an even number.
    Not: `OnePeerExponential`, which sends one of these messages per step, nor `BipartiteExponential`, which is undirected.

    Pairwise averaging uses the same hops in both directions; there are then no bipartite roles, because 1 + 1 = 2.

    Reference: the gap is that of Ying et al., 2021.

    >>> Exponential().neighbours(0, num_workers=12)
    (1, 2, 4, 8)
    """

    directed: ClassVar[bool] = True

    def neighbours(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        return _at_distances(worker_id, num_workers, _powers_of_two(num_workers))

    def sends_to(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        return _at_distances(worker_id, num_workers, [-hop for hop in _powers_of_two(num_workers)])


@dataclass(frozen=True, kw_only=True)
class OnePeerExponential(Topology):
    """Each worker reads one model: 1 ahead at step 0, then 2, 4, 8, ... ahead, and again from 1. Directed, time-varying.

    Costs per step: 1 message sent and received per worker; the period is ceil(log2 num_workers) steps.
    Use when: bandwidth is scarce, the averaging is in lockstep (D-PSGD), and the number of workers is a power of two: the
    average is then exact after every period. Other numbers only approximate it; `notes` says so.
    Not: `Exponential`, which reads all of these models at every step.

    Reference: Ying et al., 2021.

    >>> [OnePeerExponential().neighbours(0, num_workers=8, step=step) for step in range(4)]
    [(1,), (2,), (4,), (1,)]
    """

    directed: ClassVar[bool] = True

    def neighbours(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        return _at_distances(worker_id, num_workers, (self._hop(num_workers, step),))

    def sends_to(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        return _at_distances(worker_id, num_workers, (-self._hop(num_workers, step),))

    def period(self, num_workers: int) -> int:
        return max(1, len(_powers_of_two(num_workers)))

    def caution(self, num_workers: int) -> str:
        below = 1 << (num_workers.bit_length() - 1)
        if num_workers == below:
            return ""
        return (
            f"The one-peer exponential graph averages exactly only for powers of two; with {num_workers} workers every "
            f"period only comes near the average. Use {below} or {2 * below} workers for exact averaging."
        )

    def _hop(self, num_workers: int, step: int) -> int:
        return 1 << step % self.period(num_workers)


@dataclass(frozen=True, kw_only=True)
class BipartiteExponential(Topology):
    """Each worker talks to the workers 1, 3, 5, 9, 17, ... before and after; even numbers of workers only.

    Costs per step: up to 2 log2(num_workers) messages sent and received per worker; only 1 if averaging is pairwise.
    Use when: averaging is pairwise and asynchronous (AD-PSGD) and workers are many: it agrees nearly as fast as a complete
    graph, and odd workers are active, even ones passive.
    Not: `Exponential`, whose even hops make cycles of odd length.

    The hops are 1 and 2^i + 1 for i from 1 to floor(log2(num_workers - 1)). All are odd: i = 0 would give 2, which joins two
    active workers, and two active workers that call each other deadlock.

    Reference: for the use of bipartite graphs, Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient
        Descent", ICML 2018, arXiv:1710.06952.

    >>> BipartiteExponential().neighbours(0, num_workers=8)
    (1, 3, 5, 7)
    """

    def neighbours(self, worker_id: int, num_workers: int, step: int = 0) -> tuple[int, ...]:
        if num_workers == 1:
            return ()
        largest = (num_workers - 1).bit_length() - 1  # floor(log2(num_workers - 1))
        hops = [1, *((1 << i) + 1 for i in range(1, largest + 1))]
        return _at_distances(worker_id, num_workers, [*hops, *(-hop for hop in hops)])

    def check(self, num_workers: int) -> None:
        super().check(num_workers)
        _check_even("bipartite-exponential", num_workers, instead="exponential")


def _ascending(workers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(workers)))


def _at_distances(worker_id: int, num_workers: int, distances: Iterable[int]) -> tuple[int, ...]:
    """The workers at these signed distances on a circle, without the worker itself."""
    return _ascending({(worker_id + one) % num_workers for one in distances} - {worker_id})


def _powers_of_two(num_workers: int) -> list[int]:
    """1, 2, 4, ... below num_workers."""
    return [1 << power for power in range((num_workers - 1).bit_length())]


@lru_cache(maxsize=64)
def _divisor_below_root(number: int) -> int:
    return next(divisor for divisor in range(math.isqrt(number), 0, -1) if number % divisor == 0)


def _check_even(name: str, num_workers: int, *, instead: str) -> None:
    if num_workers % 2 and num_workers != 1:
        raise UsageError(
            f"Topology {name} needs an even number of workers, not {num_workers}: an odd cycle cannot be split into active "
            f"and passive workers. Use {num_workers - 1} or {num_workers + 1} workers, or topology={instead}."
        )


@lru_cache(maxsize=64)  # every worker of a simulation asks for the same split
def _two_colouring(topology: Topology, num_workers: int) -> Roles | None:
    period = topology.period(num_workers)
    colour: dict[int, int] = {}
    for start in range(num_workers):
        if start in colour:
            continue
        colour[start] = 0
        waiting = [start]
        while waiting:
            here = waiting.pop()
            for there in {one for step in range(period) for one in topology.partners(here, num_workers, step)}:
                if there not in colour:
                    colour[there] = 1 - colour[here]
                    waiting.append(there)
                elif colour[there] == colour[here]:
                    return None
    active = frozenset(worker for worker, side in colour.items() if side)
    return Roles(active, frozenset(colour) - active)
