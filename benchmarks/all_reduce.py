"""Step times of `all-reduce` against DistributedDataParallel: the same two processes, the same Gloo, in turns.

    python benchmarks/all_reduce.py [--gpus GPUS] [--rounds ROUNDS] [--steps STEPS] [--only NAME] [--json]

Both sides run the same loop on the same batches. With --gpus, each worker has a GPU and both sides use NCCL. A round is so
many steps of each side, whose order alternates; a step time is a round's, the slowest worker's. A ratio is the median of the
rounds' ratios, with a 95 % interval of that median. Bytes are what the loopback device sent meanwhile, other programs that
use it included.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from plain_loop import make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl

NUM_WORKERS = 2
WARM_UP_STEPS = 10


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2016, option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (batch, inputs, height, width) to (batch, outputs, ...)."""
        y = self.second_norm(self.second(self.first_norm(self.first(x)).relu()))
        shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return (y + shortcut).relu()


def make_resnet_20() -> nn.Module:
    """ResNet-20 for CIFAR-10: about 270,000 parameters."""
    blocks = [Block(max(16, width // 2) if first else width, width, 1 + (first and width > 16))
              for width in (16, 32, 64) for first in (True, False, False)]  # fmt: skip
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "mnist-mlp, batch 64": (make_model, 64, (784,)),
    "ResNet-20, batch 16": (make_resnet_20, 16, (3, 32, 32)),
}


def loopback_bytes() -> int:
    """Bytes that the loopback device has sent so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def measure(name: str, rounds: int, steps: int, device: torch.device) -> dict[str, float]:
    """Runs one case in this worker; worker 0's result counts."""
    make, batch_size, shape = CASES[name]
    num_workers = dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(batch_size, *shape, generator=generator).to(device),
            torch.randint(0, 10, (batch_size,), generator=generator).to(device),
        )
        for _ in range(8)
    ]
    endless = batches * (num_workers * (WARM_UP_STEPS + rounds * steps))

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, source: Iterator, num_steps: int) -> None:
        for _ in range(num_steps):
            x, y = next(source)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    torch.manual_seed(0)
    model, peer = make().to(device), make().to(device)
    num_bytes = sum(p.nbytes for p in model.parameters())
    wrapped = DistributedDataParallel(peer)
    optimizer, peers = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, peer))
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    sent: dict[str, list[float]] = {"ours": [], "theirs": []}
    with pl.attach(model, optimizer, algorithm="all-reduce") as worker:
        sides = {
            "ours": (model, optimizer, iter(worker.batches(endless))),
            "theirs": (wrapped, peers, iter(endless)),
        }
        for side in sides.values():
            loop(*side, WARM_UP_STEPS)
        for number in range(rounds):
            for side in sorted(sides, reverse=bool(number % 2)):
                dist.barrier()
                bytes_before, begun_s = loopback_bytes(), time.perf_counter()
                loop(*sides[side], steps)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                took_s = torch.tensor(time.perf_counter() - begun_s, device=device)
                dist.all_reduce(took_s, op=dist.ReduceOp.MAX)
                sent[side].append((loopback_bytes() - bytes_before) / steps / num_workers)
                times[side].append(took_s.item() / steps)
    ratios = sorted(a / b for a, b in zip(times["ours"], times["theirs"], strict=True))
    outside = max(
        0, round(rounds / 2 - 0.98 * rounds**0.5) - 1
    )  # so many at each end are outside the median's 95 % interval
    return {
        "rounds": rounds,
        "ours_ms": 1e3 * statistics.median(times["ours"]),
        "theirs_ms": 1e3 * statistics.median(times["theirs"]),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[outside],
        "ratio_high": ratios[-1 - outside],
        "sent_bytes": statistics.median(sent["ours"]),
        "their_sent_bytes": statistics.median(sent["theirs"]),
        "optimum_bytes": 2 * (num_workers - 1) / num_workers * num_bytes,
    }


def work(rounds: int, steps: int, only: str, *, on_gpus: bool) -> None:
    """A worker: all cases with `only` in their name, one after the other."""
    torch.set_num_threads(1)
    # The peer's model is trained inside the same `with` as ours, so that rounds alternate, and by an optimizer of its own.
    warnings.filterwarnings("ignore", "The loop steps a SGD that attach was not given", UserWarning)
    device = torch.device("cuda", int(os.environ["RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    results = {name: measure(name, rounds, steps, device) for name in CASES if only in name}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    """Starts the workers and prints what they measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=0, help="workers with a GPU each; default: two workers on CPUs")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=40, help="steps of each side in a round")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if "RANK" in os.environ:
        work(given.rounds, given.steps, given.only, on_gpus=given.gpus > 0)
        return
    num_workers = given.gpus or NUM_WORKERS
    with socket.socket() as held:  # until they end: the kernel gives a port that is bound to no connection
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_workers)}
        workers = [
            subprocess.Popen(
                [sys.executable, *sys.argv], env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(num_workers)
        ]
        outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        sys.exit("a worker failed")
    results = json.loads(outputs[0].splitlines()[-1])  # before it, Gloo prints lines of its own in PyTorch 2.8 and 2.9
    if given.json:
        print(json.dumps(results))
        return
    print(
        "| model | ours, ms per step | DistributedDataParallel, ms | ratio | bytes per worker and step, times the optimum |"
    )
    print("|---|---|---|---|---|")
    for name, one in results.items():
        optimum = one["optimum_bytes"]
        factors = "-"  # one worker, or GPUs, whose collectives do not use the loopback device
        if optimum and not given.gpus:
            factors = f"{one['sent_bytes'] / optimum:.3f} (DDP {one['their_sent_bytes'] / optimum:.3f})"
        print(
            f"| {name} | {one['ours_ms']:.2f} | {one['theirs_ms']:.2f} | {one['ratio']:.3f}"
            f" ({one['ratio_low']:.3f} to {one['ratio_high']:.3f}) | {factors} |"
        )


if __name__ == "__main__":
    main()
