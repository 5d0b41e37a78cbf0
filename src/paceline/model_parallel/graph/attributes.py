"""Plain values that a model's Python code reads: constants of its graph, which is traced again when a loop changes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from torch import nn

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, Enum)
_LONGEST = 1000  # a longer list or dict is compared by identity: it is data rather than settings
_DEEPEST = 3  # of an object's own objects, which may be all of a trainer
_REGISTRIES = frozenset(vars(nn.Module()))


def values_of(model: nn.Module) -> dict[str, Any]:
    """By name, the attributes of the user's modules, and the numbers of their files that `forward` reads.

    Containers and objects are compared by their contents, tensors and others by identity. Modules of torch.nn are left out:
    a graph runs them as they are.

    Costs: a few microseconds per module.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if module.__module__.startswith("torch.nn"):
            continue
        found[f"{path}.training".lstrip(".")] = module.training
        for name, value in vars(module).items():
            if name not in _REGISTRIES and not name.startswith("_tensor_constant"):
                found.update(_flat(f"{path}.{name}".lstrip("."), value, seen))
        found.update(_read_by(type(module)))
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of values that differ."""
    return [one for one in {**before, **after} if before.get(one, changed) != after.get(one, changed)]


def _flat(path: str, value: Any, seen: set[int], depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _PLAIN):
        yield path, value
        return
    is_long = isinstance(value, list | tuple | dict | set) and len(value) > _LONGEST
    if id(value) in seen or is_long or depth > _DEEPEST or isinstance(value, torch.Tensor | nn.Module):
        yield path, id(value)
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner = [(f"[{_plain(key)!r}]", one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        inner = [(f"[{at}]", one) for at, one in enumerate(value)]
    elif isinstance(value, set | frozenset):
        inner = [(f"[{one!r}]", True) for one in map(_plain, value)]
    elif hasattr(value, "__dict__") and not callable(value):
        inner = [(f".{name}", one) for name, one in vars(value).items()]
    else:
        inner = []
    yield path, len(inner) or id(value)
    for name, one in inner:
        yield from _flat(path + name, one, seen, depth + 1)


def _plain(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else id(value)


def _read_by(kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Numbers of a module's classes, and those that its `forward` names: of its file, or of a function around the class."""
    classes = [one for one in kind.__mro__ if not one.__module__.startswith("torch.")]
    pairs = [(f"{kind.__qualname__}.{name}", value) for one in reversed(classes) for name, value in vars(one).items()]
    function = unwrap(kind.forward)
    if isinstance(function, FunctionType):
        names, variables = function.__code__.co_names, function.__globals__
        pairs += [(f"{name} of {kind.__module__}", variables[name]) for name in names if name in variables]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not assigned yet
                pairs.append((f"{name} around {kind.__qualname__}", cell.cell_contents))
    yield from (pair for pair in pairs if isinstance(pair[1], int | float))
