"""Hooks on a loop's modules that copies and saved files leave out, so that these do not need Paceline."""

from __future__ import annotations

import contextlib
import copyreg
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.system.torch_internals import PRE_HOOKS

_classes: Counter[type[nn.Module]] = Counter()  # how many models that are watched have modules of them
_lock = threading.Lock()


class HiddenHook:
    """A hook of Paceline's. A copy made by a class's own code does nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def hookable(model: nn.Module) -> list[nn.Module]:
    """The modules that accept hooks: TorchScript's do not, so the loop's calls of them go unseen."""
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


def leave_out_of_copies(model: nn.Module) -> Callable[[], None]:
    """From here on, `copy`, `pickle` and `torch.save` leave hidden hooks out of the model's modules.

    A class with its own entry in `copyreg` keeps it.

    Returns:
        what to call when the hooks are removed.
    """
    classes = {type(module) for module in hookable(model)}
    with _lock:
        ours = {one for one in classes if one in _classes or one not in copyreg.dispatch_table}
        for one in ours:
            copyreg.pickle(one, _reduced)
        _classes.update(ours)
    return partial(_forget, ours)


def _forget(classes: set[type[nn.Module]]) -> None:
    with _lock:
        for one in classes:
            _classes[one] -= 1
            if not _classes[one]:
                del _classes[one], copyreg.dispatch_table[one]


def _reduced(module: nn.Module) -> Any:
    """The module's reduction by its class, without hidden hooks."""
    how = module.__reduce_ex__(2)
    if isinstance(how, str) or len(how) < 3 or not isinstance(how[2], dict):
        return how
    state: dict[str, Any] = how[2]
    hidden = {
        number
        for name in PRE_HOOKS
        for number, hook in state.get(name, {}).items()
        if isinstance(getattr(hook, "hook", hook), HiddenHook)  # PyTorch wraps some
    }
    left = {
        name: type(hooks)((number, hook) for number, hook in hooks.items() if number not in hidden)
        for name, hooks in state.items()
        if name in PRE_HOOKS
    }
    return how[0], how[1], {**state, **left}, *how[3:]
