"""Workers that another launcher started: torchrun, Slurm, MPI, Ray Train, TorchDistributor. They meet in torch's store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.data.epoch_claims import StoredEpochClaims
from paceline.errors import UsageError, WorkerLostError, name_workers
from paceline.membership.environment import LaunchedEnvironment
from paceline.membership.rendezvous import common_store, missing_keys, own_part, wait_for_readers
from paceline.membership.tables import StoredTables
from paceline.optim.model_state import digest, from_bytes, to_bytes
from paceline.optim.sharding import AxisShape
from paceline.ports.shared import Needs
from paceline.system.torch_internals import abort_process_group
from paceline.transport.axes import AxisCollectives, make_axes
from paceline.transport.collectives import DistributedCollectives

_FAREWELL_S = 5.0
_GROUP_EXTRA_S = 5.0  # the group's own deadline comes after ours, whose message names the missing workers
_NCCL_EXTRA_S = 60.0  # NCCL's deadline counts from the launch of an operation on the GPU, and ends the process
_FINAL = "final"  # whether worker 0's loop has left weights in its model
_dist: Any = dist  # its type stubs do not name the stores
_num_joined = 0  # attach may be used several times in a process; each time has its own part of the store


def check_algorithm(spec: str, needs: Needs) -> None:
    """Refuses algorithms that these workers cannot run: they share no memory, and may be on several machines."""
    if needs.kind not in ("replicated", "served"):
        raise UsageError(
            f"{spec} needs memory that all workers share, which workers of torchrun and other launchers do not have: "
            "start them with paceline.launch, or choose an algorithm that sends messages, such as all-reduce."
        )
    if needs.copies > 1:
        raise UsageError(
            f"{spec} keeps a second copy of each shard in its own process, which torchrun and other launchers do not "
            "start: start the workers with paceline.launch, or leave durability=replica out."
        )


class LaunchedRun:
    """One worker's side of a run that another launcher started.

    Uses the user's default process group, if it exists, only to make another group; otherwise makes the default group, and
    ends it.

    Attributes:
        collectives: over all of them.

    Raises:
        UsageError: the workers disagree (the message says which differ), two use one GPU, or PyTorch has no NCCL.
        WorkerLostError: a worker did not arrive within the deadline.
    """

    def __init__(
        self,
        environment: LaunchedEnvironment,  # this worker, and the deadline
        hello: dict[str, str],  # what all must agree on, as text: the algorithm, and the model's shapes
        gpu: str | None = None,  # the unique name of this worker's GPU, if collectives run on it, over NCCL
        random_states: tuple[int, ...] = (),
        state: Sequence[torch.Tensor] = (),  # all tensors of the model, which become worker 0's
    ) -> None:
        global _num_joined
        _num_joined += 1
        self._worker_id, self._num_workers = environment.worker_id, environment.num_workers
        self.deadline_s = environment.deadline_s
        self._owns_default = not dist.is_initialized()
        self.store: Any = own_part(common_store(environment), str(_num_joined))  # where the workers of the run meet
        self.tables = StoredTables(self.store, self._worker_id, self._num_workers)  # what they tell each other there
        self.tables.tell_random_states(random_states)
        differing = self._agree(hello, gpu, state)
        if gpu is not None and not dist.is_nccl_available():
            raise UsageError(
                "Collectives between GPUs need NCCL, which this PyTorch was built without: move the model with "
                "model.cpu(), or install PyTorch for CUDA on Linux."
            )
        self._is_nccl = gpu is not None
        backend = "cpu:gloo,cuda:nccl" if self._is_nccl else "gloo"
        group_timeout = timedelta(seconds=self.deadline_s + (_NCCL_EXTRA_S if self._is_nccl else _GROUP_EXTRA_S))
        if self._owns_default:
            dist.init_process_group(
                backend,
                store=_dist.PrefixStore("group", self.store),
                rank=self._worker_id,
                world_size=self._num_workers,
                timeout=group_timeout,
            )
            self._group: Any = dist.group.WORLD
        else:
            self._group = dist.new_group(backend=backend, timeout=group_timeout)
        self.collectives = DistributedCollectives(
            self._group, self.store, self._worker_id, self._num_workers, timeout_s=self.deadline_s
        )
        for number, num_bytes in differing:
            self._become_worker_0s(state[number], num_bytes)

    def axes(self, axes: Mapping[str, AxisShape]) -> dict[str, AxisCollectives]:
        """Collectives along each axis on which this worker is not alone. All workers must make the same calls."""

        def make(group: Any, ranks: Sequence[int]) -> AxisCollectives:
            own = self._worker_id, self._num_workers
            counts = self.collectives.counts
            return AxisCollectives(group, ranks, self.store, *own, timeout_s=self.deadline_s, counts=counts)

        return make_axes(axes, self._worker_id, self._num_workers, self.deadline_s + _GROUP_EXTRA_S, make)

    def start_from_worker_0(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._become_worker_0s(tensor, tensor.nbytes)

    def _become_worker_0s(self, tensor: torch.Tensor, num_bytes: int) -> None:
        raw = torch.empty(num_bytes, dtype=torch.uint8) if self._worker_id else to_bytes(tensor)
        self.collectives.broadcast(raw)
        if self._worker_id:
            from_bytes(tensor, raw)

    def hears_of_left(self, is_left: bool) -> bool:
        """Whether worker 0's loop has left weights in its model: worker 0 says so, and the others wait for its answer.

        Raises:
            WorkerLostError: worker 0 does not leave its `with` within the deadline.
        """
        self.collectives.end()
        self.collectives.on_wait()
        if self._worker_id == 0:
            self.store.set(_FINAL, "1" if is_left else "0")
        elif missing_keys(self.store, [_FINAL], self.deadline_s, self.collectives.on_wait):
            raise WorkerLostError(
                f"end: worker 0, whose model is the run's result, did not leave its `with` within {self.deadline_s:g} s. See"
                " its output; or set PACELINE_DEADLINE_S higher."
            )
        return self.store.get(_FINAL) == b"1"

    def claims(self) -> StoredEpochClaims:
        return StoredEpochClaims(self.store)

    def close(self, *, failed: bool) -> None:
        """Leaves; worker 0, which may hold the store, stays until all have, or the deadline has passed.

        After a failure it stays only until the others can have heard of it.
        """
        self.collectives.leave()
        if failed and not self._worker_id:
            with contextlib.suppress(RuntimeError):  # the store is gone, and its readers with it
                self.store.set(_FINAL, "0")  # the others do not wait for weights from it
        group = None if self._owns_default else self._group
        if failed and self._is_nccl:  # a hanging GPU operation would block until NCCL ends the process
            abort_process_group(group)
        else:
            dist.destroy_process_group(group)
        if self._worker_id == 0:
            is_lost = failed or self.collectives.somebody_gave_up()  # a worker may be lost in the very last operation
            within_s = min(_FAREWELL_S, self.deadline_s) if is_lost else self.deadline_s
            missing_keys(self.store, [f"left/{worker}" for worker in range(self._num_workers)], within_s)

    def _agree(self, hello: dict[str, str], gpu: str | None, state: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Compares the workers' hellos; returns (number, bytes on worker 0) of each tensor that differs."""
        digests = list(map(digest, state))
        self.store.set(f"hello/{self._worker_id}", json.dumps([hello, gpu, digests], sort_keys=True))
        keys = [f"hello/{worker}" for worker in range(self._num_workers)]
        if missing := missing_keys(self.store, keys, self.deadline_s):
            raise WorkerLostError(
                f"start: {name_workers(missing)} did not call paceline.attach within {self.deadline_s:g} s. See its output;"
                " it may have ended before."
            )
        others, gpus, states = zip(*(json.loads(self.store.get(key)) for key in keys), strict=True)
        differing = [worker for worker, other in enumerate(others) if other != others[0]]
        wait_for_readers(self.store, "hello", self._worker_id, range(self._num_workers))
        if differing:
            other = others[differing[0]]
            what = next(name for name in other if other[name] != others[0].get(name))
            remedy = "Build the same model and name the same algorithm on every worker."
            if what == "plan":
                remedy = "Load the plan from the same file on every worker."
            raise UsageError(
                f"The workers disagree on the {what}: {_short(others[0][what])} on worker 0, {_short(other[what])} on"
                f" {name_workers(differing)}. {remedy}"
            )
        on_this = [worker for worker, other in enumerate(gpus) if gpu is not None and other == gpu]
        if len(on_this) > 1:
            raise UsageError(
                f"{name_workers(on_this).capitalize()} have their models on one GPU, but NCCL needs one GPU for each "
                "worker: use model.to(f\"cuda:{os.environ['LOCAL_RANK']}\")."
            )
        rows = enumerate(zip(*states, strict=True))
        return [(number, row[0][0]) for number, row in rows if any(one != row[0] for one in row)]


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
