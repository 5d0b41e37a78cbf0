"""Workers that another launcher started: torchrun, Slurm, MPI, Ray Train, TorchDistributor. They meet in torch's store."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from paceline.environment import WorkerEnvironment
from paceline.errors import UsageError, WorkerLostError, name_workers
from paceline.transport.base import Ports
from paceline.transport.collectives import DistributedCollectives
from paceline.transport.parameters import MemoryRequest

__all__ = ["Membership", "check_algorithm", "ports_for"]

_CLAIM_BATCHES = 4  # a trip to the store takes as long as a small step; a claim of several shares it
_FAREWELL_S = 5.0
_GROUP_EXTRA_S = 5.0  # the group's own deadline comes after ours, whose message says who is missing
_dist: Any = dist  # its type stubs do not name the stores
_store: Any = None  # the one that this process has made
_num_joined = 0  # attach may be used several times in a process; each time has a part of the store to itself


def check_algorithm(spec: str, request: MemoryRequest) -> None:
    """Refuses algorithms that these workers cannot run: they share no memory, and may be on several machines.

    Raises:
        UsageError: with the remedy.
    """
    if request.kind not in ("replicated", "served"):
        raise UsageError(
            f"{spec} works on memory that all workers share, and workers that torchrun or another launcher started share none:"
            " start them with paceline.launch, or choose an algorithm that sends, such as all-reduce."
        )
    if request.copies > 1:
        raise UsageError(
            f"{spec} keeps a second copy of each shard in a process of its own, and torchrun or another launcher starts none:"
            " start the workers with paceline.launch, or leave durability=replica out."
        )


class Membership:
    """What one worker holds of a run whose launcher is not ours.

    Uses the user's default process group if there is one, for nothing but to make a group of its own; otherwise it makes the
    default group, and ends it.

    Args:
        environment: this worker, and the deadline.
        hello: what all must agree on, as text: the algorithm, and the model's shapes.

    Raises:
        UsageError: the workers disagree; the message says who differs.
        WorkerLostError: a worker did not come within the deadline.
    """

    def __init__(self, environment: WorkerEnvironment, hello: dict[str, str]) -> None:
        global _num_joined
        _num_joined += 1
        self._worker_id, self._num_workers = environment.worker_id, environment.num_workers
        self.deadline_s = environment.deadline_s
        self._owns_default = not dist.is_initialized()
        # torchrun's own store outlives the workers that it starts again: what the dead ones said in it must not count.
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store: Any = _dist.PrefixStore(f"paceline/{life}/{_num_joined}", _common_store(environment))
        self._agree(hello)
        group_timeout = timedelta(seconds=self.deadline_s + _GROUP_EXTRA_S)
        if self._owns_default:
            dist.init_process_group(
                "gloo",
                store=_dist.PrefixStore("group", self.store),
                rank=self._worker_id,
                world_size=self._num_workers,
                timeout=group_timeout,
            )
            self._group: Any = dist.group.WORLD
        else:
            self._group = dist.new_group(backend="gloo", timeout=group_timeout)
        self.collectives = DistributedCollectives(
            self._group, self.store, self._worker_id, self._num_workers, timeout_s=self.deadline_s
        )

    def start_from_worker_0(self, tensors: Iterable[torch.Tensor]) -> None:
        """Every worker's tensors become worker 0's."""
        for tensor in tensors:
            self.collectives.broadcast(tensor)

    def claims(self) -> Callable[[], int]:
        """Claims of the next batch number of all workers, several at a time from a counter in the store."""
        numbers: list[int] = []

        def claim() -> int:
            if not numbers:
                end = self.store.add("next batch", _CLAIM_BATCHES)
                numbers.extend(range(end - _CLAIM_BATCHES, end))
            return numbers.pop(0)

        return claim

    def address(self) -> tuple[str, Path | None]:
        """The address by which the others reach this worker, and the key file, which is needed off loopback.

        Raises:
            UsageError: the workers are on several machines, and there is no key file.
        """
        key = os.environ.get("PACELINE_KEY")
        here = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').readlink()}"
        self.store.set(f"machine/{self._worker_id}", here)
        machines = {self.store.get(f"machine/{worker}").decode() for worker in range(self._num_workers)}
        if len(machines) == 1:
            return "127.0.0.1", Path(key) if key else None
        self._wait_for_readers("machine")
        if not key:
            raise UsageError(
                "The workers are on several machines, so what they send each other must be encrypted: make a key with"
                " `paceline key FILE`, copy it to every machine, and set PACELINE_KEY=FILE for every worker."
            )
        with socket.create_connection(
            (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), self.deadline_s
        ) as probe:
            return probe.getsockname()[0], Path(key)

    def close(self, *, failed: bool) -> None:
        """Leaves; worker 0, which may hold the store, stays until all have, or the deadline has passed.

        After a failure it stays for as long as the others need to hear of it.
        """
        self.collectives.leave()
        if self._owns_default:
            dist.destroy_process_group()
        else:
            dist.destroy_process_group(self._group)
        if self._worker_id == 0:
            within_s = min(_FAREWELL_S, self.deadline_s) if failed else self.deadline_s
            self._await([f"left/{worker}" for worker in range(self._num_workers)], within_s)

    def _agree(self, hello: dict[str, str]) -> None:
        self.store.set(f"hello/{self._worker_id}", json.dumps(hello, sort_keys=True))
        keys = [f"hello/{worker}" for worker in range(self._num_workers)]
        if missing := self._await(keys, self.deadline_s):
            raise WorkerLostError(
                f"start: {name_workers(missing)} did not call paceline.attach within {self.deadline_s:g} s. See its output;"
                " it may have ended before."
            )
        others = [json.loads(self.store.get(key)) for key in keys]
        differing = [worker for worker, other in enumerate(others) if other != others[0]]
        self._wait_for_readers("hello")
        if differing:
            other = others[differing[0]]
            what = next(name for name in other if other[name] != others[0].get(name))
            raise UsageError(
                f"The workers disagree on the {what}: {_short(others[0][what])} on worker 0, {_short(other[what])} on"
                f" {name_workers(differing)}. Build the same model and name the same algorithm on every worker."
            )

    def _wait_for_readers(self, what: str) -> None:
        """This worker has read what all have said; whoever holds the store must not end, with an error, before all have."""
        self.store.set(f"read/{what}/{self._worker_id}", "1")
        if self._worker_id == 0:
            self._await([f"read/{what}/{worker}" for worker in range(self._num_workers)], _FAREWELL_S)

    def _await(self, keys: list[str], within_s: float) -> list[int]:
        """Waits until all keys are there; returns the positions of those that are not in time."""
        until_s = time.monotonic() + within_s
        missing = list(range(len(keys)))
        while True:
            missing = [index for index in missing if not self.store.check([keys[index]])]
            if not missing or time.monotonic() > until_s:
                return missing
            time.sleep(0.005)


def _common_store(environment: WorkerEnvironment) -> Any:
    """The user's process group's store; else the launcher's; else one at MASTER_ADDR and MASTER_PORT, which worker 0 holds."""
    global _store
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if _store is not None:
        return _store
    deadline, timeout = f"{environment.deadline_s:g} s", timedelta(seconds=environment.deadline_s)
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    holds_it = environment.worker_id == 0
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _store = next(_dist.rendezvous("env://", environment.worker_id, environment.num_workers, timeout=timeout))[
                0
            ]
        else:
            _store = _dist.TCPStore(host, int(port), is_master=holds_it, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        if holds_it or isinstance(error, ValueError):
            raise UsageError(
                f"Worker 0 cannot listen at MASTER_PORT={port} ({str(error).splitlines()[0]}): choose a free port."
            ) from error
        raise WorkerLostError(
            f"start: worker 0, which the others meet at {host}:{port}, did not call paceline.attach within {deadline}. See its"
            " output; or MASTER_ADDR and MASTER_PORT are not the same everywhere."
        ) from error
    return _store


def ports_for(environment: WorkerEnvironment, request: MemoryRequest, ports: Ports, membership: Membership) -> Ports:
    """The ports of a worker alone in its memory, made those of one among many: what reaches others comes from here."""
    membership.collectives.counts = ports.counts
    return dataclasses.replace(
        ports,
        worker_id=environment.worker_id,
        num_workers=environment.num_workers,
        random=Random(f"{environment.seed}/{environment.worker_id}"),
        collectives=membership.collectives if request.collectives else None,
    )


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
