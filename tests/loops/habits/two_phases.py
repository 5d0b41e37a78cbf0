"""A sharpness-aware optimizer with `first_step` and `second_step`, whose inner optimizer `attach` is given."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


class TwoPhases:
    """The loop makes a gradient before each of the two."""

    def __init__(self, inner, radius):
        self.inner, self.radius = inner, radius
        self.parameters = [p for group in inner.param_groups for p in group["params"]]
        self.kept = []

    @torch.no_grad()
    def first_step(self):
        self.kept = [p.clone() for p in self.parameters]
        for p in self.parameters:
            p.add_(self.radius * p.grad / (p.grad.norm() + 1e-12))
        self.inner.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p, kept in zip(self.parameters, self.kept, strict=True):
            p.copy_(kept)
        self.inner.step()
        self.inner.zero_grad()


def loop(attach):
    model, inner = made()
    optimizer = TwoPhases(inner, radius=0.05)
    batches = loader()
    with attach(model, inner) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(batches):
                F.cross_entropy(model(x), y).backward()
                optimizer.first_step()
                F.cross_entropy(model(x), y).backward()
                optimizer.second_step()
    return model
