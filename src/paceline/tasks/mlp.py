"""A multi-layer perceptron with little call overhead."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Fully connected layers with ReLU between them and torch's default initialisation.

    `forward` calls the functions directly: at batch 16, nn.Sequential's module calls take a measurable part of a step.

    Args:
        *widths: features of the input, of each hidden layer and of the output.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        # Parameters keep their identity for life (only their data moves), so they need not be looked up in every forward.
        self._affine = [(layer.weight, layer.bias) for layer in cast(Iterable[nn.Linear], self.layers)]

    def forward(self, x: Tensor) -> Tensor:
        """Logits (samples, last width) of inputs (samples, first width)."""
        *hidden, last = self._affine
        for weight, bias in hidden:
            x = torch.relu(F.linear(x, weight, bias))
        return F.linear(x, *last)
