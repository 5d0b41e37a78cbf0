"""The simulated machines: virtual time, memory, network, parameters, and the workers' ports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.loop.buckets import bucket_bytes_for
from paceline.optim.half_types import sum_type
from paceline.ports.ports import Counts, Ports, ServerPorts
from paceline.ports.shared import Needs
from paceline.simulator.cluster import Cluster
from paceline.simulator.collectives import AllReduceState, SimulatedCollectives
from paceline.simulator.concurrency import SimulatedConcurrency
from paceline.simulator.faults import Disturbances, DropLink, Faults, Kill, Pause
from paceline.simulator.hardware.bus import MemoryBus
from paceline.simulator.hardware.core import COPY_VECTORS, Core, OwnMemory, SimulatedClock
from paceline.simulator.hardware.cores import Cores, SharedCore
from paceline.simulator.hardware.numa import SocketCore, SocketMachine
from paceline.simulator.hardware.sockets import Placing
from paceline.simulator.lives import Lives
from paceline.simulator.locks import LockedState, LockState
from paceline.simulator.loopback import LoopbackNetwork
from paceline.simulator.mailbox import SimulatedMailbox
from paceline.simulator.memory import ReplicatedState, SimulatedRacing, SimulatedSlots, SimulatedStalenessCounts
from paceline.simulator.network import Network
from paceline.simulator.network_collectives import CollectiveCosts, NetworkCollectives, NetworkCollectivesState
from paceline.simulator.scheduler import Scheduler
from paceline.simulator.served import ServedState
from paceline.simulator.views import SimulatedViews
from paceline.specs.bounds import check_simulation


class SimulatedMachine:
    """State that the workers of one run share.

    Attributes:
        shared: the state of the shared parameters; has `version` and `snapshot`.
        num_blocks: number of blocks in which a replica writes and copies a vector of this kind.
        lives: which workers are alive.
        all_reduce: the state of their collectives; None: they have none.
    """

    def __init__(
        self,
        cluster: Cluster,
        needs: Needs,  # the kind of shared parameters that the algorithm runs on
        *,
        x: torch.Tensor,  # initial parameters (P,), copied; empty for timing only
        vector_bytes: int,  # size of one parameter vector, even if `x` is empty
        batch_size: int,
        seed: int,
        is_gossip: bool = False,  # whether every worker has its own model
        survivors_continue: bool = False,  # whether collectives in shared memory go on without killed workers
        faults: Faults | None = None,
        scheduler: Scheduler | None = None,  # of the programs; None: a new one
        # Of vectors and workers, if the cluster has sockets; None: the kernel's default.
        placing: Placing | None = None,
        restarts: int = 0,  # as of `Lives`
        min_workers: int = 1,  # as of `Lives`, where rounds let workers in
        # Vectors that an update at a server moves; None: as many as one of the workers' optimizer.
        update_vectors: float | None = None,
    ) -> None:
        programs = cluster.workers + (needs.server_programs if cluster.workers > 1 else 0)
        check_simulation(programs, needs.num_vectors(cluster.workers) * vector_bytes if x.numel() else 0)
        self.cluster, self.needs = cluster, needs
        self.scheduler = scheduler or Scheduler(runs_torch=x.numel() > 0)
        self.staleness = SimulatedStalenessCounts()
        self.num_blocks = cluster.racing_blocks if needs.kind == "racing" else 1
        self._x, self._vector_bytes = x, vector_bytes
        self._batch_size, self._seed = batch_size, seed
        self._is_timing_only = not x.numel()
        self._codec_moves = cluster.codec_moves
        self._cores = Cores.of(cluster, self.scheduler) if cluster.cores else None
        self._spin_s = cluster.spin_s if cluster.workers <= (cluster.cores or 0) else 0.0  # like `have_core_each`
        on_one_machine = needs.one_machine or self._cores is not None
        self._collective = cluster.collective or ("memory" if on_one_machine else "ring")
        self._is_networked = needs.mailbox or (needs.collectives and self._collective != "memory")
        self._faults = faults or Faults()
        if not self._is_networked and any(isinstance(one, DropLink) for one in self._faults.script):
            raise UsageError("These workers share one machine's memory: there is no link to drop. Leave out drop_link.")
        self._sockets: SocketMachine | None = None
        if cluster.sockets is not None and self._is_networked:
            raise UsageError(
                "Each of these workers has its own machine and they share no memory; leave out the cluster's sockets."
            )
        if cluster.sockets is not None:
            is_pool = needs.kind in ("slots", "replicated")
            self._sockets = SocketMachine(self.scheduler, cluster, placing or Placing(), is_pool=is_pool)
        elif self._is_networked:
            self._memory = OwnMemory(self.scheduler, cluster.core_bytes_per_s)
        else:
            self._memory = MemoryBus(self.scheduler, cluster.core_bytes_per_s, cluster.bus_bytes_per_s)
        self.all_reduce: Any = None
        if needs.collectives and self._collective == "memory":
            self.all_reduce = AllReduceState(self.scheduler, cluster, self._spin_s, survivors_continue)
        elif needs.collectives:
            self.all_reduce = NetworkCollectivesState(self.scheduler, cluster.workers)
            self._costs = CollectiveCosts(cluster, "tree" if self._collective == "tree" else "ring")
        self.views: Any = SimulatedViews(self.scheduler, cluster.workers) if needs.views and on_one_machine else None
        shares_memory = self.views is not None or (needs.collectives and self._collective == "memory")
        replaces = survivors_continue and shares_memory
        self._num_servers = needs.servers if cluster.workers > 1 else 0  # a lone worker needs none
        self._num_server_programs = self._num_servers * needs.copies
        if self._cores is not None:
            self._network: Network = LoopbackNetwork(self.scheduler, cluster, self._num_server_programs, self._cores)
        else:
            self._network = Network(self.scheduler, cluster, self._num_server_programs)
        update_vectors = cluster.update_vectors if update_vectors is None else update_vectors
        self.shared: Any = self._shared_state(x.clone(), is_gossip=is_gossip, update_vectors=update_vectors)
        self.lives = Lives(
            cluster,
            self.scheduler,
            self._network,
            [one for one in (self.views, self.all_reduce) if one is not None],
            min_workers=min_workers if replaces else None,
            restarts=restarts if replaces or not survivors_continue else 0,
            own_vectors=self.shared if needs.kind == "replicated" else None,
            has_servers=self._num_servers > 0,
        )
        self.new_mailbox: Callable[..., SimulatedMailbox] = SimulatedMailbox
        self.further_ports: Callable[[int, int], dict[str, Any]] = lambda *_: {}  # or others, by worker, incarnation
        self._core_of: dict[int, Core] = {}
        self._counts: list[Counts] = []  # of all incarnations
        self._plan_faults()

    def _shared_state(self, x: torch.Tensor, *, is_gossip: bool, update_vectors: float) -> Any:
        """The state of the parameters for all workers, which owns the initial ones, `x` (P,)."""
        needs, cluster = self.needs, self.cluster
        match needs.kind:
            case "racing":
                return SimulatedRacing(x, self._caller)
            case "slots":
                return SimulatedSlots(x, self._caller)
            case "locked":
                is_shared = needs.lock == "rwlock"
                lock = LockState(self.scheduler, cluster.wake_s, sharing=is_shared, spin_s=self._spin_s)
                return LockedState(x, lock)
            case "replicated":
                return ReplicatedState(x, cluster.workers, is_mean=is_gossip)
            case "served":
                averaged, num_servers = needs.averaged, self._num_servers
                return ServedState(x, cluster.workers, num_servers, averaged=averaged, update_vectors=update_vectors)

    def core(self, worker_id: int) -> Core:
        """A worker's core, on its own machine if the workers use the network; all incarnations share it."""
        if worker_id in self._core_of:
            return self._core_of[worker_id]
        disturbances = Disturbances(self._faults, worker_id) if self._faults.script else None
        named: dict[str, Any] = {
            "scheduler": self.scheduler,
            "cluster": self.cluster,
            "worker_id": worker_id,
            "seed": self._seed,
            "vector_bytes": self._vector_bytes,
            "batch_size": self._batch_size,
            "disturbances": disturbances if disturbances is not None and disturbances.any else None,
            "overlaps": self.needs.collectives and self._collective != "memory",
        }
        if self._sockets is not None:
            core: Core = SocketCore(machine=self._sockets, **named)
        elif self._cores is not None:
            in_place = self.needs.kind in ("racing", "slots") and self.cluster.workers > 1
            core = SharedCore(memory=self._memory, cores=self._cores, fetched_vectors=float(in_place), **named)
        else:
            core = Core(memory=self._memory, **named)
        core.die = partial(self.lives.kill, worker_id)
        self._core_of[worker_id] = core
        return core

    def _caller(self) -> Core:
        return self._core_of[self.scheduler.current.worker_id]

    def ports(self, core: Core) -> Ports[Any]:
        return Ports(**self._given(core))

    def _given(self, core: Core) -> dict[str, Any]:
        worker_id, counts = core.worker_id, Counts()
        core.moved_s = 0.0  # what an earlier incarnation has moved is not this one's
        incarnation = self.lives.incarnations.get(worker_id, 0)
        mailbox = concurrency = None
        self._counts.append(counts)
        if self.needs.mailbox:
            mailbox = self.new_mailbox(
                self.scheduler,
                self._network,
                worker_id=worker_id,
                num_workers=self.cluster.workers + self._num_server_programs,
                counts=counts,
                declared_bytes=self._declared_bytes,
                incarnation=incarnation,
                copy_s_per_byte=0.0 if self._cores is not None else COPY_VECTORS / self.cluster.core_bytes_per_s,
            )
            self._network.boxes[worker_id] = mailbox
            concurrency = SimulatedConcurrency(self.scheduler, worker_id, self.cluster.wake_s)
        return {
            "worker_id": worker_id,
            "num_workers": self.cluster.workers,
            "clock": SimulatedClock(self.scheduler),
            "random": Random(f"{self._seed}/{worker_id}"),
            "shared": self.shared.of(core),
            "staleness": self.staleness,
            "moved": self._moved(core),
            "collectives": self._collectives(core, counts),
            "views": self.views,
            "newcomers": self.lives.newcomers,
            "mailbox": mailbox,
            "concurrency": concurrency,
            "counts": counts,
            "incarnation": incarnation,
            "num_servers": self._num_servers,
            "codec_moves": self._codec_moves,
            **self.further_ports(worker_id, incarnation),
        }

    def _moved(self, core: Core) -> Callable[..., None]:
        """Waits while the program itself moves a vector of the parameters' size, or of a server's shard."""
        scheduler = self.scheduler
        length = 1.0 if core.worker_id < self.cluster.workers else 1.0 / self._num_servers
        alone_s = self._vector_bytes / self.cluster.core_bytes_per_s
        is_alone = self._is_networked and self._cores is None  # with its own memory and no contention

        def moved(vectors: float, of: torch.Tensor | None = None) -> None:
            num_bytes = None if of is None else of.nbytes or getattr(of, "num_bytes", None)
            vectors *= length * getattr(of, "share", 1.0) if not num_bytes else num_bytes / self._vector_bytes
            if not is_alone:
                core.move(vectors)
                return
            scheduler.take(vectors * alone_s)
            if scheduler.current.is_main:
                core.moved_s += vectors * alone_s

        return moved

    @property
    def unresolved_exchanges(self) -> int:
        return sum(one.unresolved_exchanges for one in self._counts)

    @property
    def delay(self) -> int:
        """Steps by which averages arrive late, if programs have chosen a delay."""
        return max(one.delay for one in self._counts)

    @property
    def _declared_bytes(self) -> int | None:
        return self._vector_bytes // max(1, self._num_servers) if self._is_timing_only else None

    def _collectives(self, core: Core, counts: Counts) -> Any:
        if not self.needs.collectives:
            return None
        if self._collective == "memory":
            return SimulatedCollectives(self.all_reduce, core)
        widening = sum_type(self._x.dtype).itemsize // self._x.dtype.itemsize
        named = {"declared_bytes": self._declared_bytes, "widening": widening, "moved": self._moved(core)}
        return NetworkCollectives(self.all_reduce, self._costs, core.worker_id, counts, **named)

    def start(self, worker_id: int, work: Callable[[], object]) -> None:
        """Adds a worker's program; when it ends, its further programs end too, and the others learn of it."""

        def run() -> None:
            work()
            self.scheduler.catch_up()
            self.lives.end(worker_id)

        self.scheduler.start(worker_id, run)

    def start_servers(self, serve: Callable[[int, ServerPorts], None]) -> None:
        """Adds the programs of servers and second copies, each on its own machine; they end with the last worker."""
        for server in range(self._num_server_programs):
            given = self._given(self.core(self.cluster.workers + server))
            ports = ServerPorts(**given, copies=self.needs.copies > 1)

            def run(server: int = server, ports: ServerPorts = ports) -> None:
                with torch.no_grad():
                    serve(server % self._num_servers, ports)

            shard = f"shard {server % self._num_servers} of the server"
            name = shard if server < self._num_servers else f"the second copy of {shard}"
            self.scheduler.start(self.cluster.workers + server, run, is_main=False, server=name)

    def release(self) -> None:
        """Drops programs and vectors, which refer to each other."""
        self._network.boxes.clear()
        self.lives.release()
        vars(self).clear()

    # Faults

    def _plan_faults(self) -> None:
        for fault in self._faults.script:
            match fault:
                case Kill(worker=worker, at_s=float() | int() as at_s):
                    self.scheduler.call_at(at_s, partial(self.lives.kill, worker))
                case DropLink(a=a, b=b, at_s=at_s):
                    self.scheduler.call_at(at_s, partial(self._drop_link, a, b))
                case Pause(worker=worker, at_s=at_s, for_s=for_s):
                    self.scheduler.call_at(at_s, partial(self._network.pause, worker, for_s))

    def _drop_link(self, a: int, b: int) -> None:
        if self.needs.mailbox:
            self._network.drop_link(a, b)
        if isinstance(self.all_reduce, NetworkCollectivesState):
            link = (min(a, b), max(a, b))
            if link in self._costs.links:
                self.all_reduce.cut(link, self.cluster.detection_s)

    def base_arguments(self, ports: Ports[Any]) -> dict[str, Any]:
        """Arguments of a worker's `BaseReplica`, except its binding and its recorder."""
        candidates = (ports.clock, ports.shared, ports.collectives, ports.mailbox, ports.concurrency)
        waits = [port for port in candidates if hasattr(port, "waited_s")]
        return {
            "waits": waits,
            "staleness": self.staleness if self.needs.staleness_counts else None,
            "stopped": never,
            "counts": ports.counts if self.needs.mailbox or self.needs.collectives else None,
            "now_s": ports.clock.now_s,
            "incarnation": ports.incarnation,
            "bucket_bytes": bucket_bytes_for(ports.num_workers, self.needs.bucket_bytes),
        }


def never() -> bool:
    """Returns False: a simulation that is stopped cuts its programs off, and asks none of them to stop."""
    return False
