"""Two models and two optimizers that step in turn, each after its own `backward`, as in a GAN."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, _ = made()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.2) for part in (model.body, model.head)]
    with attach((model.body, model.head), optimizers) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                for one in optimizers:
                    one.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    one.step()
    return model
