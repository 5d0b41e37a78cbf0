"""An optimizer on a part of the flat vector, built from settings; servers apply gradients with it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.optim.flat import with_its_own_storage
from paceline.optim.ranges import Ranges
from paceline.optim.rows import Selection
from paceline.optim.saved_state import kinds_of
from paceline.optim.settings import OptimizerSettings, as_vectors, cut_state, make_optimizer, named, raw_step
from paceline.system.saved_state import check_fits


class FlatOptimizer:
    """The optimizers that settings describe, on one part of the flat vector.

    Args:
        settings: for the whole vector.
        x: the part's elements (n,), updated in place.
        begin: where the part begins.
    """

    def __init__(self, settings: OptimizerSettings, x: torch.Tensor, begin: int) -> None:
        self._name = settings.name
        self._names = dict.fromkeys(settings.names)
        self._parts: list[tuple[nn.Parameter, slice]] = []
        self._numbers: dict[str, list[int]] = {}  # by optimizer: of its groups that have elements here
        groups: dict[str, list[dict[str, Any]]] = {}
        for number, (name, group) in enumerate(zip(settings.names, settings.groups, strict=True)):
            parameters = []
            for first, last in group.ranges:
                part = slice(max(first, begin) - begin, min(last, begin + len(x)) - begin)
                if part.start < part.stop:
                    parameters.append(nn.Parameter(with_its_own_storage(x[part])))
                    self._parts.append((parameters[-1], part))
            if parameters:
                groups.setdefault(name, []).append({"params": parameters, **dict(group.values)})
                self._numbers.setdefault(name, []).append(number)
        self._num_elements = len(x)
        self._settings: OptimizerSettings | None = None
        self._optimizers = {name: make_optimizer(name, own) for name, own in groups.items()}
        self._steps = [raw_step(one) for one in self._optimizers.values()]

    def step(
        self,
        gradient: torch.Tensor,
        settings: OptimizerSettings,
        scale: float = 1.0,
        missing: Ranges = (),
        selection: Selection | None = None,
    ) -> None:
        """One step with `gradient` (n,) at the settings' rates, times `scale`; the caller is under no_grad.

        `missing`: elements of this part without a gradient, which make no step. `selection`: the elements that the gradient
        (count,) has; None: all.

        Raises:
            UsageError: the settings are another optimizer's.
        """
        if settings.name != self._name:
            raise UsageError(f"The workers have different optimizers: {self._name} and {settings.name}.")
        if settings is not self._settings or scale != 1.0:
            for name, optimizer in self._optimizers.items():
                for group, number in zip(optimizer.param_groups, self._numbers[name], strict=True):
                    group.update(settings.groups[number].values)
                    group["lr"] = group["lr"] * scale
            self._settings = settings if scale == 1.0 else None
        if missing:
            self._cut({end for own in missing for end in own})
        if selection is not None:
            with torch.sparse.check_sparse_tensor_invariants(enable=False):  # rows have been checked
                self._give_rows(selection, gradient)
                self._make_step()
        else:
            for parameter, part in self._parts:
                if not any(first <= part.start < last for first, last in missing):
                    parameter.grad = gradient[part]
            self._make_step()

    def _make_step(self) -> None:
        for step in self._steps:
            step()
        for parameter, _ in self._parts:
            parameter.grad = None  # its memory is the next message's

    def _give_rows(self, selection: Selection, gradient: torch.Tensor) -> None:
        """Gives the parameters their gradients: sparse ones, of one dimension, to tables."""
        self._cut({end for where, _ in selection.table_parts() for end in (where.start, where.stop)})
        for where, index, values in selection.each(gradient):
            for parameter, part in self._parts:
                if not where.start <= part.start < where.stop:
                    continue
                if index is None:
                    parameter.grad = values[part.start - where.start : part.stop - where.start]
                else:
                    size = (where.stop - where.start,)
                    parameter.grad = torch.sparse_coo_tensor(index.unsqueeze(0), values, size, is_coalesced=True)

    def _cut(self, ends: set[int]) -> None:
        """Splits the parts, and their state, at these elements."""
        parts, divided = dict(self._parts), []
        for optimizer, group in [(one, group) for one in self._optimizers.values() for group in one.param_groups]:
            parameters = []
            for parameter in group["params"]:
                part = parts[parameter]
                within = sorted(end for end in ends if part.start < end < part.stop)
                pieces = list(pairwise([part.start, *within, part.stop]))
                state = optimizer.state.pop(parameter, None) if within else None
                for first, last in pieces:
                    own = slice(first - part.start, last - part.start)
                    one = nn.Parameter(with_its_own_storage(parameter.data[own])) if within else parameter
                    if state:
                        optimizer.state[one] = {
                            key: value.clone() if isinstance(value, torch.Tensor) else value
                            for key, value in cut_state(state, own).items()
                        }
                    parameters.append(one)
                    divided.append((one, slice(first, last)))
            group["params"] = parameters
        self._parts = divided

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the state, such as momentum, as vectors (n,), or numbers without a dimension if equal for all.

        If some elements have no state yet, a vector `without_state` (n,) is 1 for these. If the settings have several
        optimizers, names begin with the optimizer's.
        """
        parts, states = dict(self._parts), {}
        for name, optimizer in self._optimizers.items():
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            states[name] = as_vectors([(parts[one], optimizer.state.get(one, {})) for one in own], self._num_elements)
        return named({name: states.get(name, {}) for name in self._names}) if states else {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        for name, optimizer in self._optimizers.items():
            begin = f"{name}." if len(self._names) > 1 else ""
            own = {key.removeprefix(begin): value for key, value in state.items() if key.startswith(begin)}
            if own:
                self._load(optimizer, own)

    def _load(self, optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
        group = optimizer.param_groups[0]
        kinds = kinds_of(state.keys() - {"without_state"}, optimizer, group, group["params"][0])
        numbers = {key for key, value in kinds.items() if not torch.as_tensor(value).dim()}
        for key in numbers & state.keys():
            if state[key].dtype == torch.float64:  # of a process whose default type that is
                state[key] = state[key].to(torch.as_tensor(kinds[key]).dtype)
        check_fits(state, self._like(state, kinds), "the servers' state")
        values = dict(state)
        without = values.pop("without_state", torch.zeros(self._num_elements))
        by_element = [without, *(value for key, value in values.items() if key in numbers and value.dim())]
        self._cut({int(end) + 1 for one in by_element for end in one.diff().nonzero()})
        parts = dict(self._parts)
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if not without[parts[parameter].start]:
                part = parts[parameter]
                optimizer.state[parameter] = {key: _entry(value, kinds[key], part) for key, value in values.items()}

    def _like(self, state: dict[str, torch.Tensor], kinds: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The expected state: for each kind one number per element, or one for all if the optimizer has one."""
        like = {}
        for key, value in ((key, torch.as_tensor(value)) for key, value in kinds.items()):
            found = state.get(key)
            is_for_all = not value.dim() and found is not None and not found.dim()
            like[key] = value.new_empty(() if is_for_all else self._num_elements)
        without = torch.zeros(self._num_elements, dtype=torch.float32)
        return like | ({"without_state": without} if "without_state" in state else {})


def _entry(value: torch.Tensor, kind: Any, part: slice) -> Any:
    """A parameter's entry of the state: its elements, or a number, which SparseAdam keeps as an integer."""
    if torch.as_tensor(kind).dim():
        return value[part].clone()
    number = value[part.start] if value.dim() else value
    return number.clone() if isinstance(kind, torch.Tensor) else number.item()
