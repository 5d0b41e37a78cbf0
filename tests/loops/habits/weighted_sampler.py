"""WeightedRandomSampler."""

import torch
import torch.nn.functional as F
from torch.utils.data import WeightedRandomSampler

from loops.problem import EPOCHS, SAMPLES, TRAIN, loader, made


def loop(attach):
    model, optimizer = made()
    counts = torch.bincount(TRAIN[1])
    sampler = WeightedRandomSampler((1.0 / counts[TRAIN[1]]).tolist(), SAMPLES)
    batches = loader(sampler=sampler, shuffle=False)
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(batches):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return model
