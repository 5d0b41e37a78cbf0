"""ReduceLROnPlateau follows the validation loss after each epoch."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, held_out_loss, loader, made


def loop(attach):
    model, optimizer = made(lr=0.3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            scheduler.step(held_out_loss(model))
    return model
