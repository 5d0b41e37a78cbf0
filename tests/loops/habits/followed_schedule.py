"""OneCycle or cosine, stepped per batch, with `worker.follow(scheduler)`."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, optimizer = made()
    batches = loader()
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=EPOCHS * len(batches) + 1)
    with attach(model, optimizer) as worker:
        scheduler = worker.follow(cycle)
        for _ in range(EPOCHS):
            for x, y in worker.batches(batches):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
    return model
