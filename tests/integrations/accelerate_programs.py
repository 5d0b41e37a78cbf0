"""A loop with Accelerate, as users write it: `python accelerate_programs.py FOLDER` is what each worker of a launcher runs."""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl


def digits():
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    return TensorDataset(*data[:1440]), TensorDataset(*data[1440:])


def made(accumulation, **of_loader):
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    train_set, test_set = digits()
    of_loader = {"batch_size": 40, "shuffle": True, "generator": torch.Generator().manual_seed(5)} | of_loader
    loader = DataLoader(train_set, **of_loader)
    return accelerator, *accelerator.prepare(model, optimizer, loader), test_set


def epoch(accelerator, model, optimizer, batches):
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()


def plain(accumulation, epochs=3, **of_loader):
    """The loop as it was."""
    accelerator, model, optimizer, loader, _ = made(accumulation, **of_loader)
    for _ in range(epochs):
        epoch(accelerator, model, optimizer, loader)
    return vector(model)


def attached(accumulation, epochs=3, algorithm=None):
    """The same with two more lines."""
    accelerator, model, optimizer, loader, test_set = made(accumulation)
    with pl.attach(model, optimizer, algorithm) as worker:
        for _ in range(epochs):
            epoch(accelerator, model, optimizer, worker.batches(loader))
    x, y = test_set[:]
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    return worker, vector(model), accuracy


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def count_steps(folder):
    """1440 samples are 36 batches, of which 5 make a step: 8 steps an epoch, the last of them with one batch."""
    accelerator, model, optimizer, loader, _ = made(5, shuffle=False)
    steps = []
    optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    with pl.attach(model, optimizer) as worker:
        for _ in range(2):
            epoch(accelerator, model, optimizer, worker.batches(loader))
    torch.save({"x": vector(model), "steps": len(steps)}, Path(folder) / f"{worker.worker_id}.pt")


def learn(folder, algorithm=None):
    worker, found, accuracy = attached(2, epochs=6, algorithm=algorithm)
    torch.save({"x": found, "accuracy": accuracy}, Path(folder) / f"{worker.worker_id}.pt")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    learn(sys.argv[1])
