"""PyTorch's own on the course, under torchrun: DistributedDataParallel, and post-local SGD on top of it.

Every epoch ends with a checkpoint, from which all start again when torchrun has restarted them.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from contest.course import Settings, Worker, batches_of, load_data, make_model, make_optimizer

PERIOD, WARMUP_STEPS = 8, 50


def main() -> None:
    """One worker."""
    settings = Settings.here()
    module = make_model(settings)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=_store(), rank=rank, world_size=settings.workers)
    local = settings.spec == "post-local-sgd"
    optimizer: torch.optim.Optimizer = make_optimizer(settings, module)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=not local)
    if local:  # imported here, since that takes seconds, which plain DDP's restart shall not pay for
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.algorithms.model_averaging.utils import average_parameters
        from torch.distributed.optim import PostLocalSGDOptimizer

        # Each worker is a machine of its own: once local SGD has begun, gradients are averaged with nobody.
        state = PostLocalSGDState(None, None, start_localSGD_iter=WARMUP_STEPS, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(PERIOD, WARMUP_STEPS))
    data = load_data(settings.data, "train")
    sampler = DistributedSampler(TensorDataset(*data), seed=settings.seed, drop_last=True)
    path = Path(settings.folder) / "checkpoint"
    first_epoch = 0
    if path.exists():
        saved = torch.load(path)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"]
        if local:
            state.iter = first_epoch * settings.rounds_per_epoch
    worker = Worker(settings, rank)
    worker.line_up()
    for epoch in range(first_epoch, settings.epochs):
        sampler.set_epoch(epoch)
        for x, y in batches_of(settings, list(sampler), data):
            optimizer.zero_grad()
            worker.gradient(model, x, y)
            optimizer.step()
            worker.stepped(module, len(x))
        if local:  # the epoch may end between two averages
            average_parameters(module.parameters(), dist.group.WORLD)  # type: ignore[arg-type]
        if rank == 0:
            _save(path, module, optimizer, epoch + 1)
    dist.destroy_process_group()


def _store() -> dist.Store:
    """torchrun's, with names of its own for every start: with `env://` Gloo finds the addresses of dead workers there."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def _save(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(saved, unfinished)
    unfinished.rename(path)


if __name__ == "__main__":
    main()
