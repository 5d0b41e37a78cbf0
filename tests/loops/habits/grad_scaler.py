"""GradScaler, with a step that overflows."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with attach(model, optimizer) as worker:
        for epoch in range(EPOCHS):
            for number, (x, y) in enumerate(worker.batches(loader())):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if epoch == 1 and number == 2:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return model
