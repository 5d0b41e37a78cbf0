"""Two optimizers, each over a part of the model, step after the same `backward`."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, _ = made()
    optimizers = [  # the first one's rate is that of rules by which servers override both
        torch.optim.SGD(model.head.parameters(), lr=0.2),
        torch.optim.Adam(model.body.parameters(), lr=0.02),
    ]
    with attach(model, optimizers) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                for one in optimizers:
                    one.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for one in optimizers:
                    one.step()
    return model
