"""The model is evaluated inside the loop, also in the middle of an epoch."""

import torch.nn.functional as F

from loops.problem import EPOCHS, held_out_loss, loader, made


def loop(attach):
    model, optimizer = made()
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for number, (x, y) in enumerate(worker.batches(loader())):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if number % 3 == 0:
                    assert held_out_loss(model) > 0
    return model
