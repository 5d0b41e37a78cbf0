"""LBFGS evaluates its closure several times in a step."""

import torch
import torch.nn.functional as F

from loops.problem import TRAIN, made


def loop(attach):
    model, _ = made()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    with attach(model, optimizer) as worker:
        x, y = (part[worker.worker_id :: worker.num_workers] for part in TRAIN)

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for _ in range(10):
            optimizer.step(closure)
    return model
