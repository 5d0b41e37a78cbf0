"""Plain values that a model's Python code reads: constants of its graph, which is traced again when a loop changes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache
from itertools import chain
from pathlib import Path
from sysconfig import get_path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, Enum)
_NUMBERS, _FUNCTIONS = (int, float), (FunctionType, staticmethod, classmethod)
_PYTHON, _OURS = Path(get_path("stdlib")), Path(__file__).parents[2]
_LONGEST = 1000  # a longer list or dict is compared by identity: it is data rather than settings
_DEEPEST = 3  # of an object's own objects, which may be all of a trainer
_REGISTRIES = frozenset(vars(nn.Module()))


def values_of(model: nn.Module) -> dict[str, Any]:
    """By name, the attributes of the user's modules, and the numbers and tensors of their files that their methods read.

    Containers and objects are compared by their contents, tensors by identity and number of changes, others by identity.
    Modules of torch.nn are left out: a graph runs them as they are.

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
    if isinstance(value, torch.Tensor):
        yield path, _version(value)
        return
    if id(value) in seen or is_long or depth > _DEEPEST or isinstance(value, nn.Module):
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


def _version(tensor: torch.Tensor) -> tuple[int, int | None]:
    """Changes with each in-place operation, which tensors of inference mode do not count."""
    return id(tensor), None if tensor.is_inference() else tensor._version


def _plain(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else id(value)


def _read_by(kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Numbers of a module's classes, and those that its methods, and functions that these call, read from around them."""
    classes = [one for one in kind.__mro__ if not one.__module__.startswith("torch.")]
    members = [pair for one in reversed(classes) for pair in vars(one).items()]
    for name, value in members:
        if isinstance(value, _NUMBERS):
            yield f"{kind.__qualname__}.{name}", value
    functions = [one.fget if isinstance(one, property) else one for _, one in members]
    seen: set[int] = set()
    while functions:
        function = functions.pop()
        if not isinstance(function, _FUNCTIONS) or id(function) in seen:
            continue
        seen.add(id(function))
        functions.append(getattr(function, "__wrapped__", None))
        if not isinstance(function, FunctionType) or not _is_users(function.__code__.co_filename):
            continue
        for name, value in _around(function):
            if isinstance(value, _NUMBERS):
                yield name, value
            elif isinstance(value, torch.Tensor):
                yield name, _version(value)
            else:
                functions.append(value)


def _around(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables that a function names: of its file, of modules that it names, and of a function around it."""
    variables, names = function.__globals__, _names(function.__code__)
    for name in names:
        if name not in variables:
            continue
        value = variables[name]
        yield f"{name} of {function.__module__}", value
        if isinstance(value, ModuleType) and _is_users(getattr(value, "__file__", None) or ""):
            yield from ((f"{name}.{one}", vars(value)[one]) for one in names if one in vars(value))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield f"{name} around {function.__qualname__}", cell.cell_contents


@cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The names that a function reads, or one inside it."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return tuple(sorted({*code.co_names, *chain.from_iterable(inner)}))


@cache
def _is_users(file: str) -> bool:
    """Whether a file is the user's own, and so of neither Python, nor an installed package, nor this one."""
    path = Path(file)
    installed = "site-packages" in path.parts or "dist-packages" in path.parts
    return bool(file) and not installed and not any(one in path.parents for one in (_PYTHON, _OURS))
