"""The user's optimizer elsewhere: what it is, as data, and the same one again on a part of the flat vector."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.errors import UsageError

__all__ = ["ELEMENTWISE", "FlatOptimizer", "OptimizerSettings", "SettingsGroup", "raw_step", "settings_of"]

# With these, every element of a parameter is updated from its own gradient and state alone, so one step over the whole flat
# vector, or over parts of it, gives the same bits as one step per parameter, without a Python loop over parameters.
ELEMENTWISE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop,
}  # fmt: skip
_BY_NAME = {kind.__name__: kind for kind in ELEMENTWISE}


class SettingsGroup(NamedTuple):
    """One parameter group: the elements of the flat vector (P,) that it is about, and its settings."""

    ranges: tuple[tuple[int, int], ...]  # first element, and the one after the last
    values: tuple[tuple[str, Any], ...]  # learning rate, momentum, ..., as torch names them


class OptimizerSettings(NamedTuple):
    """An elementwise torch.optim optimizer as data: its class and its groups, with the rates that hold now."""

    name: str
    groups: tuple[SettingsGroup, ...]

    @property
    def learning_rate(self) -> float:
        """The first group's."""
        return dict(self.groups[0].values)["lr"]

    def to_tensor(self) -> torch.Tensor:
        """As bytes, to be sent."""
        return torch.frombuffer(bytearray(json.dumps(self).encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, sent: torch.Tensor) -> OptimizerSettings:
        """What `to_tensor` wrote.

        Raises:
            ValueError: it is something else.
        """
        name, groups = json.loads(bytes(sent.tolist()))
        if name not in _BY_NAME:
            raise ValueError(f"no optimizer {name!r}")
        return cls(name, tuple(SettingsGroup(_tuples(ranges), _tuples(values)) for ranges, values in groups))


def settings_of(
    optimizer: torch.optim.Optimizer, ranges: Callable[[nn.Parameter], tuple[int, int] | None]
) -> OptimizerSettings:
    """An optimizer as data.

    Costs: a few microseconds per group, and per parameter.

    Args:
        optimizer: the user's.
        ranges: where a parameter lies in the flat vector; None: it is not trained.

    Raises:
        UsageError: it is a class of the user's own, or one whose step needs whole parameters.
    """
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        known = ", ".join(sorted(_BY_NAME))
        raise UsageError(
            f"A server cannot apply {kind.__name__}, which it knows nothing of: choose one of {known}, or let the server apply"
            " a rule of its own (apply=...)."
        )
    groups = []
    for group in optimizer.param_groups:
        values = tuple((key, _plain(value)) for key, value in group.items() if key != "params")
        groups.append(SettingsGroup(tuple(filter(None, map(ranges, group["params"]))), values))
    return OptimizerSettings(kind.__name__, tuple(groups))


class FlatOptimizer:
    """The optimizer that settings describe, on one part of the flat vector.

    Args:
        settings: of all of it.
        x: the part's elements (n,), updated in place.
        begin: where the part begins.
    """

    def __init__(self, settings: OptimizerSettings, x: torch.Tensor, begin: int) -> None:
        self._name = settings.name
        self._parts: list[tuple[nn.Parameter, slice]] = []
        self._numbers: list[int] = []  # of the groups that have elements here
        groups = []
        for number, group in enumerate(settings.groups):
            parameters = []
            for first, last in group.ranges:
                part = slice(max(first, begin) - begin, min(last, begin + len(x)) - begin)
                if part.start < part.stop:
                    parameters.append(nn.Parameter(x[part]))
                    self._parts.append((parameters[-1], part))
            if parameters:
                groups.append({"params": parameters, **dict(group.values)})
                self._numbers.append(number)
        self._num_elements = len(x)
        self._settings: OptimizerSettings | None = None
        self._optimizer = _BY_NAME[settings.name](groups) if groups else None
        self._step = raw_step(self._optimizer) if self._optimizer is not None else lambda: None

    def step(self, gradient: torch.Tensor, settings: OptimizerSettings, scale: float = 1.0) -> None:
        """One step with `gradient` (n,) at the settings' rates, times `scale`; the caller is under no_grad.

        Raises:
            UsageError: the settings are another optimizer's.
        """
        if self._optimizer is None:
            return
        if settings.name != self._name:
            raise UsageError(f"The workers have different optimizers: {self._name} and {settings.name}.")
        if settings is not self._settings or scale != 1.0:
            for group, number in zip(self._optimizer.param_groups, self._numbers, strict=True):
                group.update(settings.groups[number].values)
                group["lr"] = group["lr"] * scale
            self._settings = settings if scale == 1.0 else None
        for parameter, part in self._parts:
            parameter.grad = gradient[part]
        self._step()
        for parameter, _ in self._parts:
            parameter.grad = None  # its memory is the next message's

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of momentum and the like, as vectors (n,) and, where it is one number for all, without a dimension."""
        found: dict[str, torch.Tensor] = {}
        if self._optimizer is None:
            return found
        for parameter, part in self._parts:
            for key, value in self._optimizer.state[parameter].items():
                if not isinstance(value, torch.Tensor):
                    found[key] = torch.tensor(float(value))
                elif value.dim():
                    if key not in found:
                        found[key] = torch.zeros(self._num_elements, dtype=value.dtype)
                    found[key][part] = value
                else:
                    found[key] = value.clone()
        return found

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over what `state` returned."""
        if self._optimizer is None:
            return
        for parameter, part in self._parts:
            for key, value in state.items():
                self._optimizer.state[parameter][key] = (value[part] if value.dim() else value).clone()


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's own step without PyTorch's wrappers (profiler range, hooks, gradient mode): the caller is under no_grad.

    The wrappers cost about a tenth of a small model's step. A class of the user's own keeps them: it may rely on them.
    """
    wrapped = type(optimizer).step
    if type(optimizer).__module__.startswith("torch.optim."):
        return inspect.unwrap(wrapped).__get__(optimizer)
    return optimizer.step


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _tuples(value: Sequence[Any]) -> Any:
    return tuple(_tuples(one) if isinstance(one, list) else one for one in value)
