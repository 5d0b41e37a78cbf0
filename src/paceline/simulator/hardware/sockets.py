"""A machine of several sockets, as data: cores, memories, cost of remote access, placement of workers and vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.errors import UsageError
from paceline.specs.bounds import BYTES, FACTOR_FROM_1, PROCESSORS, SECONDS
from paceline.specs.types import check_fields

Place = tuple[int, int]
"""Where a worker runs: a socket, and one of that socket's cores."""


@dataclass(frozen=True, kw_only=True)
class Sockets:
    """Sockets with cores and a memory each; the default is a two-socket Xeon of 2016 with 36 cores (E5-2695 v4).

    In such a `Cluster`, `core_bytes_per_s` is the rate of one core alone in its own socket's memory, `bus_bytes_per_s` the
    total rate of each socket's memory (set 57e9 for four channels of DDR4-2400), and `atomic_s` moves a contended
    cache line between cores of one socket. `compute_s` is for a worker with its own core and no contention for memory.

    Sources of the defaults; none of them measures these algorithms on such a machine:

    - cores, threads: Intel's data sheet. With four memory channels of 76.8 GB/s, three quarters are sustained: STREAM gives
      75 GB/s on two E5-2695 v2 (peak 102) and 102 GB/s on two E5-2697 v3 (peak 136), 8.7 GB/s for one core of the former
      (Puget Systems, 2014), hence 57e9 and 10e9 bytes per second.
    - `threads_gain`: two threads of a core do 10 to 30 % more than one; the default is the middle.
    - `remote_factor`: a line from local memory takes about 190 cycles, from the other socket's 310 (Denneman, "NUMA
      Deep Dive", 2016), and a core keeps the same number of lines in flight. It also divides a memory's bandwidth, 57 to
      35 GB/s, which stands for the link between the sockets (two QPI of 9.6 GT/s: 38 GB/s each way).
    - `far_atomic_s`: a line last written in the other socket takes two to three times as long as one of the same socket.

    Assumed: vectors come from memory, not from caches (68 workers' vectors and batches are larger than both caches); a
    gradient's memory traffic and its arithmetic do not overlap; a waiting thread leaves its core to the other.

    >>> Sockets(cores=2).places(3)
    [(0, 0), (1, 0), (0, 1)]

    Args:
        count: number of sockets.
        used: the number of sockets, from the first, on which workers run, as under `numactl --cpunodebind`; None: all.
        cores: per socket.
        threads_per_core: hardware threads.
        threads_gain: throughput of a core's threads together, relative to one thread.
        remote_factor: how many times as long a byte of another socket's memory takes.
        far_atomic_s: moving a contended cache line to a core of another socket.
        gradient_bytes: the part of `compute_s`, for a full batch, that is memory traffic for the worker's own data (the batch,
            activations); at most `compute_s * core_bytes_per_s`. Reading the parameters once is added to it.
    """

    count: Annotated[int, PROCESSORS] = 2
    used: Annotated[int, PROCESSORS] | None = None
    cores: Annotated[int, PROCESSORS] = 18
    threads_per_core: Annotated[int, PROCESSORS] = 2
    threads_gain: Annotated[float, FACTOR_FROM_1] = 1.2
    remote_factor: Annotated[float, FACTOR_FROM_1] = 1.6
    far_atomic_s: Annotated[float, SECONDS] = 250e-9
    gradient_bytes: Annotated[float, BYTES] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.used is not None and self.used > self.count:
            raise UsageError(f"sockets.used is {self.used}, but there are {self.count} sockets.")
        PROCESSORS.check("The number of threads of all sockets", self.count * self.cores * self.threads_per_core)

    def places(self, num_workers: int, *, pin: bool = False) -> list[Place]:
        """Each worker's place: first one per core, then the further threads; if workers outnumber threads, threads repeat.

        Without `pin`, balances as the kernel does: always picks the socket and the core with the fewest workers. With it, each
        worker keeps to its share of the processors in the system's numbering (all cores' first threads, then all second ones),
        as `--placement "first-touch(pin=yes)"` does on a real machine, and runs on the least loaded of them.
        """
        processors = [
            (socket, core)
            for _ in range(self.threads_per_core)
            for socket in range(self.used or self.count)
            for core in range(self.cores)
        ]
        on_core, on_socket = dict.fromkeys(processors, 0), [0] * self.count
        places: list[Place] = []
        for worker in range(num_workers):
            mine = _share(processors, worker, num_workers) if pin else processors
            chosen = min(mine, key=lambda place: (on_core[place], on_socket[place[0]]))
            on_core[chosen] += 1
            on_socket[chosen[0]] += 1
            places.append(chosen)
        return places


@dataclass(frozen=True, kw_only=True)
class Placing:
    """Where the shared vectors lie, and whether workers are pinned; set by `--placement`."""

    # `first-touch`: on the socket that writes first; `interleave`: alternately on all sockets; `bind`: on one.
    policy: Literal["first-touch", "interleave", "bind"] = "first-touch"
    node: int = 0  # the socket that `bind` uses
    pin: bool = False  # whether each worker keeps to its share of the processors

    def shares(self, sockets: Sockets, places: list[Place], *, is_pool: bool) -> list[float]:
        """The part of a shared vector that lies in each socket's memory.

        All workers write the vectors of a pool first, such as slots; others are written by worker 0.

        Raises:
            UsageError: the machine does not have that memory.
        """
        if self.policy == "bind" and not 0 <= self.node < sockets.count:
            raise UsageError(f"The simulated machine has no memory node {self.node}: it has {sockets.count} sockets.")
        everywhere = range(sockets.count)
        if self.policy == "interleave":
            return [1.0 / sockets.count for _ in everywhere]
        if self.policy == "first-touch" and is_pool:
            return [sum(place[0] == socket for place in places) / len(places) for socket in everywhere]
        holder = self.node if self.policy == "bind" else places[0][0]
        return [float(socket == holder) for socket in everywhere]


def _share(processors: list[Place], worker: int, num_workers: int) -> list[Place]:
    """The processors that `memory.placement.pin` gives a worker."""
    if len(processors) < num_workers:
        return [processors[worker % len(processors)]]
    return processors[len(processors) * worker // num_workers : len(processors) * (worker + 1) // num_workers]
