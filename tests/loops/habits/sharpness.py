"""A sharpness-aware optimizer evaluates its closure again, at perturbed parameters."""

import torch
import torch.nn.functional as F

from loops.problem import EPOCHS, loader, made


class SharpnessAware(torch.optim.Optimizer):
    """Moves to the steepest neighbour, takes the gradient there, moves back and steps with it."""

    def __init__(self, parameters, lr, radius):
        super().__init__(parameters, {"lr": lr, "radius": radius})

    @torch.no_grad()
    def step(self, closure):
        group = self.param_groups[0]
        moves = [(p, group["radius"] * p.grad / (p.grad.norm() + 1e-12)) for p in group["params"] if p.grad is not None]
        for p, move in moves:
            p.add_(move)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for p, move in moves:
            p.sub_(move).sub_(p.grad, alpha=group["lr"])
        return loss


def loop(attach):
    model, _ = made()
    optimizer = SharpnessAware(model.parameters(), lr=0.2, radius=0.05)
    batches = loader()
    with attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(batches):

                def closure(x=x, y=y):
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    return loss

                optimizer.zero_grad()
                closure()
                worker.report(optimizer.step(closure))
    return model
