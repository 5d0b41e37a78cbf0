"""Optimizer state that all workers share: one momentum, one Adam step for all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.optim.flat import FlatBinding

# Optimizers whose state is all zeros before the first step, so that workers can share it from the start.
_ZERO_STATE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RMSprop, torch.optim.RAdam,
    torch.optim.Adadelta,
}  # fmt: skip


def shared_state_of(
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], model: nn.Module
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and types of an optimizer's state, found by one step of a throw-away copy on a zero gradient.

    Every optimizer whose state can be shared works element by element, so `TaskReplica` gives it one flat parameter (P,).

    Raises:
        UsageError: the optimizer's state does not start at zero, so that workers cannot share it from the start.
    """
    binding = FlatBinding(model.parameters())
    flat = nn.Parameter(torch.zeros(binding.num_elements, dtype=binding.dtype))
    flat.grad = torch.zeros_like(flat)
    optimizer = make_optimizer([flat])
    if type(optimizer) not in _ZERO_STATE:
        known = ", ".join(sorted(kind.__name__ for kind in _ZERO_STATE))
        raise UsageError(
            f"{type(optimizer).__name__} cannot share its state among workers, which needs state that starts at zero:"
            f" choose one of {known}, or keep the state per worker."
        )
    optimizer.step()
    return {
        f"state 0 {key}": (tuple(value.shape), value.dtype)
        for key, value in optimizer.state[flat].items()
        if isinstance(value, torch.Tensor)
    }
