"""A moving average of the weights, by `AveragedModel` inside the `with`."""

import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from loops.problem import EPOCHS, loader, made


def loop(attach):
    model, optimizer = made()
    with attach(model, optimizer) as worker:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader()):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                average.update_parameters(model)
    return average.module
