"""A global seed and the script's own `get_batch`, as in nanoGPT."""

import torch
import torch.nn.functional as F

from loops.problem import BATCH, TRAIN, made

STEPS = 60


def get_batch():
    chosen = torch.randint(len(TRAIN[0]), (BATCH,))
    return TRAIN[0][chosen], TRAIN[1][chosen]


def loop(attach):
    model, optimizer = made()
    torch.manual_seed(1337)
    with attach(model, optimizer):
        for _ in range(STEPS):
            x, y = get_batch()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return model
