"""Epochs are cut short with `break`."""

import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, optimizer = made()
    batches = loader()
    with attach(model, optimizer) as worker:
        for _ in range(3 * EPOCHS):
            for number, (x, y) in enumerate(worker.batches(batches)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if number == 2:
                    break
    return model
