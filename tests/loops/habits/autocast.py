"""bfloat16 by autocast."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, optimizer = made()
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
    return model
