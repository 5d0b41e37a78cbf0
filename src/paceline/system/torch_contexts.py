"""PyTorch's contexts, such as autocast: each simulated worker has its own, although all take turns in one process.

PyTorch has no public functions to read and set most of them, so only this file uses its private ones. Without it, a `with` of
one worker would apply to the others, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import overrides
from torch.nn.utils import parametrize
from torch.utils import _device, _python_dispatch

__all__ = ["TorchContexts"]

_C: Any = torch._C


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_nesting(depth: int) -> None:
    for _ in range(_nesting(), depth):
        torch.autocast_increment_nesting()
    for _ in range(depth, _nesting()):
        torch.autocast_decrement_nesting()


def _saved_hooks() -> list[Any]:
    hooks: list[Any] = []
    while (top := _C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.insert(0, top)
        _C._autograd._pop_saved_tensors_default_hooks()
    for pair in hooks:
        _C._autograd._push_saved_tensors_default_hooks(*pair)
    return hooks


# How each is read and set.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, _C._set_grad_enabled),
    *(
        pair
        for device in ("cpu", "cuda")
        for pair in (
            (partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)),
            (partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)),
        )
    ),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_nesting, _set_nesting),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda both: torch.set_anomaly_enabled(*both),
    ),
    (torch.get_default_dtype, torch.set_default_dtype),
)
# How each stack is read, popped from and pushed to.
_STACKS: tuple[tuple[Callable[[], list[Any]], Callable[[], Any], Callable[[Any], Any]], ...] = (
    (overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode),
    (_python_dispatch._get_current_dispatch_mode_stack, _python_dispatch._pop_mode, _python_dispatch._push_mode),
    (
        _saved_hooks,
        _C._autograd._pop_saved_tensors_default_hooks,
        lambda pair: _C._autograd._push_saved_tensors_default_hooks(*pair),
    ),
)
# Variables: of `with torch.device`, `set_default_device`, dispatch modes and `parametrize.cached`.
_VARIABLES: tuple[tuple[Any, str], ...] = (
    (_device, "CURRENT_DEVICE"),
    (getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context"),
    (_python_dispatch, "_is_in_torch_dispatch_mode"),
    (_python_dispatch, "_is_in_non_infra_torch_dispatch_mode"),
    (parametrize, "_cache_enabled"),
    (parametrize, "_cache"),
)


class TorchContexts:
    """The contexts at this object's creation; `outside` runs functions in them. Costs: some microseconds per call."""

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._outside = _read()

    def outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that it runs outside its caller's contexts."""

        def call(*arguments: Any) -> Any:
            inside = _read()
            changes = torch.is_inference_mode_enabled() is not self._inference
            with torch.inference_mode(self._inference) if changes else nullcontext():
                self.leave()
                try:
                    return function(*arguments)
                finally:
                    _write(inside)

        return call

    def leave(self) -> None:
        """Leaves all contexts that were entered since."""
        _write(self._outside)
        parametrize._cache = {}  # type: ignore[attr-defined]  # not what one worker's `cached()` has filled


def _read() -> tuple[list[Any], ...]:
    return (
        [get() for get, _ in _SETTINGS],
        [get() for get, _, _ in _STACKS],
        [getattr(owner, name, None) for owner, name in _VARIABLES],
    )


def _write(state: tuple[list[Any], ...]) -> None:
    settings, stacks, variables = state
    for (get, put), value in zip(_SETTINGS, settings, strict=True):
        if get() != value:
            put(value)
    for (get, pop, push), stack in zip(_STACKS, stacks, strict=True):
        found = get()
        if found != stack:
            for _ in found:
                pop()
            for one in stack:
                push(one)
    for (owner, name), value in zip(_VARIABLES, variables, strict=True):
        setattr(owner, name, value)
