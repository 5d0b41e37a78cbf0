"""One worker of a run on slow links: `python -m links.worker`, with RANK, MASTER_ADDR and the like as torchrun sets them."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from links.course import MOMENTUM, Course, Settings, make_model
from links.network import WIRE


def main() -> None:
    """Trains with the system that the settings name."""
    settings, rank = Settings.here(), int(os.environ["RANK"])
    course, model = Course(settings, rank), make_model(settings.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate, momentum=MOMENTUM)
    {"paceline": _paceline, "ddp": _ddp, "torchft": _torchft}[settings.program](course, model, optimizer)


def _paceline(course: Course, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    import paceline as pl

    with pl.attach(model, optimizer, algorithm=course.settings.spec, same_random=True):
        course.line_up()
        course.train(model, optimizer, model)


def _ddp(course: Course, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dist.init_process_group("gloo")
    # One bucket for a hook: PowerSGD's goes on in callbacks, whose order over several buckets differs between workers on Gloo.
    bucket_mb = None if course.settings.spec == "plain" else 64
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    if course.settings.spec == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        parallel.register_comm_hook(None, fp16_compress_hook)
    elif course.settings.spec != "plain":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        rank = int(course.settings.spec.removeprefix("power-"))
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook)
    course.line_up()
    course.train(parallel, optimizer, model)
    dist.destroy_process_group()


def _torchft(course: Course, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """DiLoCo of torchft; worker 0 also runs its lighthouse."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    said: dict[str, Any] = json.loads(course.settings.spec)
    host, first = os.environ["OWN_ADDRESS"], os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    lighthouse = None
    if course.worker_id == 0:
        lighthouse = LighthouseServer(
            bind=f"0.0.0.0:{port}",
            min_replicas=course.settings.workers,
            join_timeout_ms=60_000,
            quorum_tick_ms=10,
            heartbeat_timeout_ms=20_000,
        )
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{first}:{port}"
    os.environ["GLOO_SOCKET_IFNAME"] = WIRE

    def state_dict() -> Any:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        min_replica_size=course.settings.workers,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica-{course.worker_id}",
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname=host,
        use_async_quorum=False,
        init_sync=False,  # all begin with equal parameters
        timeout=timedelta(seconds=120),
    )
    assert isinstance(model, nn.Sequential)
    layers = [layer for layer in model if list(layer.parameters())]
    parts = [nn.ModuleList(layers[i :: said["fragments"]]) for i in range(said["fragments"])]
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
    kind = {"use_bucketization": True, "fragment_sync_delay": said["delay"]}
    with DiLoCo(manager, list(parts), optimizer, outer, said["period"], **kind):
        course.line_up()
        course.train(model, optimizer, model)
    course.wait_for_all("done")
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()


if __name__ == "__main__":
    main()
