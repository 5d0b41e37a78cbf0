"""Quantised all-reduce: gradients travel as four bits per element instead of 32, and are right on average.

    python examples/quantized.py [EPOCHS]
    python examples/quantized.py [EPOCHS] --simulate 16
    torchrun --standalone --nproc-per-node 2 examples/quantized.py [EPOCHS]

The same function on workers of this machine, on a simulated cluster whose links carry 100 Mbit/s, and under torchrun. On one
machine nothing is gained: memory is faster than coding. `dq(target_bits=4)` chooses the bits of each step by itself.
"""

import os
import sys

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

SIMULATED = int(sys.argv[-1]) if "--simulate" in sys.argv else 0
EPOCHS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 10
SPEC = "all-reduce(codec=dq(target_bits=4))"


def train() -> None:
    model, loader = make_model(), make_loader(batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    with pl.attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for images, labels in worker.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                worker.report(loss)
    if worker.worker_id == 0:
        print(f"test accuracy {accuracy(model):.3f} with {worker.num_workers} workers", flush=True)


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:  # torchrun has started the workers
        os.environ.setdefault("PACELINE_ALGORITHM", SPEC)
        train()
    elif SIMULATED:
        cluster = pl.Cluster(workers=SIMULATED, bandwidth_bytes_per_s=12.5e6, collective="ring")
        for spec in ("all-reduce", SPEC):
            result = pl.simulate(train, cluster=cluster, algorithm=spec).result
            print(
                f"{spec}: {result['bytes_per_step'] / 1e3:.1f} kB sent per step, {result['wall_s']:.2f} s of virtual time"
            )
    else:
        result = pl.launch(train, workers=2, algorithm=SPEC).result
        print(f"{result['steps']} updates, {result['bits_per_element']:.2f} bits per element with scales and frames")
