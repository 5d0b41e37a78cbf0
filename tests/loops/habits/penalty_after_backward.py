"""A penalty's gradient is added to `p.grad` after `backward`."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, optimizer = made()
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                penalty = 0.01 * model(x).square().mean()
                parameters = list(model.parameters())
                for p, g in zip(parameters, torch.autograd.grad(penalty, parameters), strict=True):
                    p.grad += g
                optimizer.step()
    return model
