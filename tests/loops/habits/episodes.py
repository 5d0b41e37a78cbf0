"""Episodes of varying length without a loader, one step each, as in REINFORCE."""

import torch
import torch.nn.functional as F

from loops.problem import TRAIN, made

STEPS = 60


def loop(attach):
    model, optimizer = made()
    torch.manual_seed(3)
    with attach(model, optimizer):
        for _ in range(STEPS):
            losses = []
            for _ in range(int(torch.randint(2, 9, ()))):
                chosen = int(torch.randint(len(TRAIN[0]), ()))
                losses.append(F.cross_entropy(model(TRAIN[0][chosen].unsqueeze(0)), TRAIN[1][chosen].unsqueeze(0)))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
    return model
