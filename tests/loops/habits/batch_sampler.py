"""A custom batch sampler, which puts similar samples together."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from loops.problem import BATCH, EPOCHS, TRAIN, made


class Similar:
    """Batches of neighbours, in random order."""

    def __init__(self):
        self.order = TRAIN[0][:, 0].argsort().split(BATCH)

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        for number in torch.randperm(len(self)).tolist():
            yield self.order[number].tolist()


def loop(attach):
    model, optimizer = made()
    batches = DataLoader(TensorDataset(*TRAIN), batch_sampler=Similar())
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(batches):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return model
