"""A loop in which one worker sleeps in its backward pass, or while it fetches a batch."""

import time

import torch
from torch import nn

import paceline as pl

SLEEP_S = 0.2


class Samples(torch.utils.data.Dataset):
    """Sixteen batches of one sample; the first sample of a batch takes `sleep_s`."""

    def __init__(self, sleep_s):
        self.sleep_s = sleep_s

    def __len__(self):
        return 48

    def __getitem__(self, index):
        time.sleep(self.sleep_s)
        x = torch.full((4,), float(index % 5))
        return x, x.sum(0, keepdim=True)


def slow_backward(output):
    output.register_hook(lambda gradient: time.sleep(SLEEP_S))


def train(slow, fault, *, deals_batches=True, steps=16):
    """Trains for at most 16 steps per worker."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with pl.attach(model, optimizer, same_random=True) as worker:
        is_slow = worker.worker_id == slow
        loader = torch.utils.data.DataLoader(Samples(SLEEP_S if is_slow and fault == "input" else 0.0))
        for step, (x, y) in enumerate(worker.batches(loader) if deals_batches else loader):
            if step == steps:
                break
            output = model(x)
            if is_slow and fault == "computing":
                slow_backward(output)
            optimizer.zero_grad()
            loss = (output - y).square().mean()
            loss.backward()
            optimizer.step()
            worker.report(loss.item())
