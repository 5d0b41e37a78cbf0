"""`forward` assigns a new tensor to a buffer: `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, INPUTS, Net, loader, made


class Centred(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(INPUTS))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x - self.mean)


def loop(attach):
    model, optimizer = made(model=Centred)
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert model.mean.abs().max() > 0
    return model
