"""A part of the model does not require gradients."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, Net, loader, made


def frozen():
    model = Net(hidden=24)
    model.body.requires_grad_(False)
    return model


def loop(attach):
    model, optimizer = made(lr=0.5, model=frozen)
    before = model.body.weight.clone()
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert torch.equal(model.body.weight, before)
    return model
