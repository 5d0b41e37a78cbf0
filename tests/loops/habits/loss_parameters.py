"""A loss with parameters, given to `attach` beside the model."""

import torch
import torch.nn.functional as F
from torch import nn

from loops.problem import CLASSES, EPOCHS, loader, made


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, logits, y):
        return F.cross_entropy(logits * self.log_scale.exp(), y)


def loop(attach):
    model, _ = made()
    loss = Tempered()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.2)
    with attach((model, loss), optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
    return model
