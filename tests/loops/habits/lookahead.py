"""Lookahead: every few steps the weights go back towards slow ones, by a wrapper whose inner optimizer `attach` is given."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


class Lookahead:
    """Wraps an optimizer."""

    def __init__(self, inner, period=3):
        self.inner, self.period, self.num_steps = inner, period, 0
        self.fast = [p for group in inner.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.fast]

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.num_steps += 1
        if self.num_steps % self.period == 0:
            for p, slow in zip(self.fast, self.slow, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


def loop(attach):
    model, inner = made()
    optimizer = Lookahead(inner)
    batches = loader()
    with attach(model, inner) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(batches):
                inner.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return model
