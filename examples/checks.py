"""Questions for `paceline replay RUN --bisect examples/checks.py:FUNCTION`."""

import torch
from torch import nn


def has_large_weight(model: nn.Module) -> bool:
    """Whether a weight is above 0.2 in magnitude."""
    return any(bool((one.abs() > 0.2).any()) for one in model.parameters())


def is_not_finite(model: nn.Module) -> bool:
    """Whether a parameter is NaN or infinite."""
    return not all(bool(torch.isfinite(one).all()) for one in model.parameters())
