"""A moving average of the weights, in a deepcopy made before `attach`."""

import copy

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, optimizer = made()
    average = copy.deepcopy(model)
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(now, 0.2)
    return average
