"""A plain PyTorch loop, and what two lines make of it: alone, in many workers, stopped at an accuracy, advised on.

    python examples/mnist.py [EPOCHS]
    paceline launch examples/mnist.py:train --workers 2 --algorithm leashed --target-accuracy 0.96
    torchrun --nproc-per-node 2 examples/mnist.py

The data are MNIST's where PACELINE_DATA names a folder that has it, else the small digits inside scikit-learn's wheel.
"""

import functools
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.tasks import load_task

EPOCHS = int(sys.argv[1]) if sys.argv[0].endswith("mnist.py") and len(sys.argv) > 1 else 5


@functools.cache
def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images as rows, 784 or 64 pixels; loaded once per process."""
    try:
        return load_task("mnist-mlp").load()
    except pl.UsageError:  # no PACELINE_DATA, or it is not in there
        return load_task("digits-mlp").load()


def accuracy(model: nn.Module) -> float:
    """Share of the test images that the model gets right."""
    images, labels = datasets()[1].tensors
    return float((model(images).argmax(dim=1) == labels).float().mean())


def train() -> None:
    torch.manual_seed(0)
    images = datasets()[0]
    width = images.tensors[0].shape[1]
    model = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(images, batch_size=64, shuffle=True)
    with pl.attach(model, optimizer, evaluate=accuracy) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                worker.report(loss)
    if worker.worker_id == 0:
        print(f"test accuracy {accuracy(model):.3f}", flush=True)


if __name__ == "__main__":
    train()
