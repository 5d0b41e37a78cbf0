"""A penalty on the gradient of the inputs: `backward` through `torch.autograd.grad(create_graph=True)`."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, optimizer = made()
    batches = loader()
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(batches):
                optimizer.zero_grad()
                x = x.clone().requires_grad_(True)
                outputs = model(x)
                (of_x,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
                (F.cross_entropy(outputs, y) + 0.01 * of_x.square().sum(1).mean()).backward()
                optimizer.step()
    return model
