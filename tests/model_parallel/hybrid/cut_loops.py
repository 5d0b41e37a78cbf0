"""Loops of a user's own under a layout; what they end with is written down by worker 0."""

import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from model_parallel.hybrid.rooms import small_vgg

LAYOUT = "hybrid(groups={}, min_weights=500)"


def samples(rows=52):
    generator = torch.Generator().manual_seed(17)
    images = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(10, (rows,), generator=generator))


def loop(
    groups, out, *, dropout=0.5, epochs=2, rows=52, clip=None, algorithm="all-reduce", torch_clip=False, kill=None
):
    """Trains with AdamW; what all workers have at the end is in a file of each."""
    model = small_vgg(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    layout = LAYOUT.format(groups) if groups else None
    shapes, norms = {}, []
    with pl.attach(model, optimizer, algorithm, layout=layout) as worker:
        shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        steps = 0
        for _ in range(epochs):
            for inputs, targets in worker.batches(DataLoader(samples(rows), batch_size=4)):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                if clip is not None:
                    norms.append(float(worker.clip_grad_norm_(clip)))
                if torch_clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                worker.report(loss)
                if kill is not None and (worker.worker_id, steps) == kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                steps += 1
    state = {name: optimizer.state[one] for name, one in model.named_parameters()}
    found = {"model": model.state_dict(), "state": state, "shapes": shapes, "norms": norms}
    torch.save(found, Path(out) / f"{worker.worker_id}.pt")


def found(out, worker=0):
    return torch.load(Path(out) / f"{worker}.pt", weights_only=False)
