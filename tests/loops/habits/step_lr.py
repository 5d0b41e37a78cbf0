"""StepLR, once per epoch."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, optimizer = made(lr=0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            scheduler.step()
    return model
