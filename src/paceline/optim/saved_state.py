"""Check saved optimizer state against the state that the optimizer itself makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from paceline.optim.settings import is_from_torch, raw_step
from paceline.system.saved_state import check_fits, unfit

asked_by_run: ContextVar[bool] = ContextVar("asked_by_run", default=False)  # not by the loop

_WHAT = "the optimizer"
_MOST = {"momentum": 0.9, "amsgrad": True, "centered": True}  # settings that add state


def first_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    """An optimizer's state for a parameter like `like`, taken from a temporary optimizer after one step with zero gradients.

    Costs memory for a few tensors of that size.
    """
    probe = nn.Parameter(torch.zeros_like(like))
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    probe.grad = torch.zeros_like(probe).to_sparse(1) if is_sparse else torch.zeros_like(probe)
    make: Any = type(optimizer)
    one = make([{**group, "params": [probe]}])
    with torch.no_grad():
        raw_step(one)()
    return one.state[probe]


def kinds_of(
    names: Iterable[str], optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor
) -> dict[str, Any]:
    """`first_state`, plus entries of these names that other settings add, as a resumed run may change settings."""
    more = {key: value for key, value in _MOST.items() if key in group}
    most = first_state(optimizer, {**group, **more}, like)
    return first_state(optimizer, group, like) | {key: most[key] for key in names if key in most}


def check_state(saved: Any, optimizers: Sequence[torch.optim.Optimizer], *, sizes: bool = True) -> None:
    """Refuses saved state, keyed by the parameters' numbers, that does not fit these optimizers.

    Checks only the form for optimizers that cannot step by themselves, such as LBFGS, and nothing for user-defined classes:
    their state may change its form from step to step, and belong to no parameter.

    Args:
        saved: the `state` of its `state_dict()`.
        optimizers: built for the same parameters.
        sizes: whether the parameters are as large as the saved ones; if not, state has one dimension, or theirs.

    Raises:
        UsageError: names the first difference.
    """
    if not all(map(is_from_torch, optimizers)):
        return
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    places = [(one, group, parameter) for one, group in groups for parameter in group["params"]]
    check_fits(saved, dict.fromkeys(saved, dict) if isinstance(saved, dict) else dict, _WHAT)
    for place, state in saved.items():
        if type(place) is not int or not 0 <= place < len(places):
            raise unfit(_WHAT, f"the state has besides {place!r}")
        if state:
            _check_one(state, *places[place], sizes=sizes)


def _check_one(
    state: dict[str, Any], one: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, *, sizes: bool
) -> None:
    if isinstance(one, torch.optim.LBFGS | torch.optim.SparseAdam):  # they need a closure, or sparse gradients
        return
    if not sizes:
        vectors = {value.shape for value in state.values() if isinstance(value, torch.Tensor) and value.dim()}
        if len(vectors) == 1 and len(shape := vectors.pop()) == 1:
            parameter = parameter.new_zeros(shape)
    kinds = kinds_of(state, one, group, parameter)
    kinds = {key: _as_loaded(value, state.get(key), parameter.dtype) for key, value in kinds.items()}
    check_fits(state, kinds, _WHAT)


def _as_loaded(value: Any, found: Any, dtype: torch.dtype) -> Any:
    """The value in the parameters' type, if it was found in that: PyTorch's `load_state_dict` casts numbers, too."""
    both = isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor)
    return value.to(dtype) if both and found.dtype == dtype else value


def check_length(state: Mapping[str, Any], length: int) -> None:
    """Refuses state of a vector of another length."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim():
            check_fits({name: value}, {name: value.new_empty(length)}, _WHAT)


def state_for_checkpoints(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's `state_dict()` for the run's own checkpoints, without a warning that a part is missing."""
    before = asked_by_run.set(True)
    try:
        return optimizer.state_dict()
    finally:
        asked_by_run.reset(before)


def load_with_own_settings(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Loads an optimizer's state; its learning rate and all other settings stay its own."""
    settings = state_for_checkpoints(optimizer)["param_groups"]
    optimizer.load_state_dict({**saved, "param_groups": settings})
