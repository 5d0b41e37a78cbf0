"""Loops for real workers whose batches are dealt by speed: a worker's speed is a timed sleep for each of its samples."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline as pl

SAMPLES, BATCH_SIZE = 400, 8
PER_SAMPLE_S = 0.001


class Numbered(Dataset):
    """Samples that say which they are."""

    def __init__(self):
        self.x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, self.x[index]


def updates(batches_of, model, optimizer, epochs, slept=lambda samples: None):
    """Trains; which samples each epoch had, and the sizes of all batches."""
    seen, sizes = [], []
    for _ in range(epochs):
        own = []
        for index, x in batches_of():
            slept(len(x))
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            own += index.tolist()
            sizes.append(len(x))
        seen.append(own)
    return seen, sizes


def made():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


@dataclass(frozen=True)
class Loop:
    """Leaves a file with what each worker was given; worker 0 is slow from a step on, to another."""

    folder: Path
    epochs: int = 2
    num_processes: int = 0
    factor: float = 3.0
    slow_from: int = 0
    slow_until: int = 1_000_000

    def __call__(self):
        model, optimizer = made()
        settings = {"num_workers": self.num_processes, "multiprocessing_context": "fork"} if self.num_processes else {}
        loader = DataLoader(Numbered(), batch_size=BATCH_SIZE, shuffle=True, **settings)
        step = 0

        def slept(samples):
            nonlocal step
            step += 1
            is_slow = worker.worker_id == 0 and self.slow_from <= step < self.slow_until
            time.sleep(PER_SAMPLE_S * samples * (self.factor if is_slow else 1.0))

        with pl.attach(model, optimizer) as worker:
            batches = worker.batches(loader)
            seen, sizes = updates(lambda: batches, model, optimizer, self.epochs, slept)
        x = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
        about = {"seen": seen, "sizes": sizes, "x": x}
        (self.folder / f"{worker.worker_id}.json").write_text(json.dumps(about))


def reference(epochs, workers):
    """Equal batches of simulated workers: what the run ends with."""

    def train():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            batches = worker.batches(DataLoader(Numbered(), batch_size=BATCH_SIZE, shuffle=True))
            updates(lambda: batches, model, optimizer, epochs)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    return pl.simulate(train, workers=workers, algorithm="all-reduce").returned[0]


if __name__ == "__main__":
    Loop(Path(os.environ["SHARES_FOLDER"]), num_processes=int(os.environ.get("SHARES_PROCESSES", "0")))()
