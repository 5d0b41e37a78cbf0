"""torchft's DistributedDataParallel and LocalSGD on the course, with one replica group per worker and a lighthouse.

The launcher replaces a dead worker. torchft is not among the project's dependencies: this runs in an environment of its own
(see `head_to_head.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.data import DistributedSampler
from torchft.local_sgd import LocalSGD

from contest.course import Settings, Worker, batches_of, load_data, make_model, make_optimizer

SYNC_EVERY, REPLICA = 8, "HEAD_TO_HEAD_REPLICA"


class Replica(NamedTuple):
    """What a loop needs; `batches` yields those of an epoch from a step of the run on."""

    worker: Worker
    manager: Manager
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Callable[[int], Iterator[list[Tensor]]]
    num_steps: int


def launch(settings: Settings) -> int:
    """Starts a lighthouse and the replicas, each again if it dies by a signal; the worst exit code."""
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=10, heartbeat_timeout_ms=1000
    )
    command = [sys.executable, "-m", "contest.torchft_peers"]
    port = lighthouse.address().rpartition(":")[2]  # the address has the machine's name, where it does not listen
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}

    def start(replica: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env={**environment, REPLICA: str(replica)})

    running = {replica: start(replica) for replica in range(settings.workers)}
    worst = 0
    while running:
        for replica, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            if code < 0:
                running[replica] = start(replica)
            else:
                worst = max(worst, code)
                del running[replica]
        time.sleep(0.1)  # as torchrun's monitor
    lighthouse.shutdown()
    return worst


def train(settings: Settings, replica: int) -> None:
    """One replica group of one worker; it takes up where the others are if it comes late."""
    model = make_model(settings)
    optimizer = make_optimizer(settings, model)

    def load_state_dict(state: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> Any:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica-{replica}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        use_async_quorum=settings.spec == "ddp",
        init_sync=False,  # all begin with equal parameters
        timeout=timedelta(seconds=5),
    )
    data = load_data(settings.data, "train")
    sampler = DistributedSampler(
        TensorDataset(*data),
        replica,
        settings.workers,
        group_rank=0,
        num_replicas=1,
        seed=settings.seed,
        drop_last=True,
    )
    worker = Worker(settings, replica)

    def batches(step: int) -> Iterator[list[Tensor]]:
        epoch, first = divmod(step, settings.rounds_per_epoch)
        sampler.set_epoch(epoch)
        return batches_of(settings, list(sampler), data, first=first)

    worker.line_up()
    num_steps = settings.epochs * settings.rounds_per_epoch
    program = averaged_gradients if settings.spec == "ddp" else local_sgd
    program(Replica(worker, manager, model, optimizer, batches, num_steps))
    manager.shutdown(wait=False)


def averaged_gradients(replica: Replica) -> None:
    """DistributedDataParallel; a step that was not committed is made again."""
    worker, manager, model, optimizer, batches, num_steps = replica
    parallel, committing = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    while (step := manager.current_step()) < num_steps:
        for x, y in batches(step):
            committing.zero_grad()
            worker.gradient(parallel, x, y)
            committing.step()
            if manager.current_step() == step + 1:
                step += 1
                worker.stepped(model, len(x))
            else:  # not committed, or it has come back and is now as far as the others are
                break


def local_sgd(replica: Replica) -> None:
    """LocalSGD; a worker that has come back is as far as the others are once it has synchronised with them."""
    worker, manager, model, optimizer, batches, num_steps = replica
    step = 0
    with LocalSGD(manager, model, optimizer, sync_every=SYNC_EVERY):
        while step < num_steps:
            for x, y in batches(step):
                optimizer.zero_grad()
                worker.gradient(model, x, y)
                optimizer.step()
                worker.stepped(model, len(x))
                behind = manager.current_step() * SYNC_EVERY - (step + 1)
                step += 1
                if behind > 0:
                    step += behind
                    break


def main() -> None:
    """The launcher, or a replica."""
    settings = Settings.here()
    if REPLICA in os.environ:
        train(settings, int(os.environ[REPLICA]))
        return
    sys.exit(launch(settings))


if __name__ == "__main__":
    main()
