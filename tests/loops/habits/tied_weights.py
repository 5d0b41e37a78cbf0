"""Two layers share one weight."""

import torch
import torch.nn.functional as F
from torch import nn

from loops.problem import CLASSES, EPOCHS, INPUTS, loader, made


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.same = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.same.weight = self.up.weight
        self.head = nn.Linear(INPUTS, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.same(torch.tanh(self.up(x)))))


def loop(attach):
    model, optimizer = made(model=Tied)
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert model.same.weight is model.up.weight
    return model
