"""An optimizer that PyTorch does not have, as a user would bring it along."""

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv:2302.06675."""

    elementwise = True

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                parameter.sub_(torch.sign(first * mean + (1 - first) * parameter.grad), alpha=group["lr"])
                mean.mul_(second).add_(parameter.grad, alpha=1 - second)


class Loud(Lion):
    """Does not say that it is elementwise, too."""
