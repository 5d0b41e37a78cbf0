"""The optimizer has a part of the model only, and the rest is not frozen."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, _ = made()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.4)
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return model
