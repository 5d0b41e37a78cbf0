"""The user's optimizer as data, to rebuild it elsewhere on a part of the flat vector."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.optim.ranges import Ranges
from paceline.optim.rows import Rows

# With these, every element of a parameter is updated from its own gradient and state alone, so one step over the whole flat
# vector, or over parts of it, gives the same bits as one step per parameter, without a Python loop over parameters.
ELEMENTWISE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop,
}  # fmt: skip
_BY_NAME = {kind.__name__: kind for kind in (*ELEMENTWISE, torch.optim.SparseAdam)}  # those that servers apply
# With these, scaling a gradient by c scales its effect by c, in this step and in all later ones: parameters and state are
# linear in each gradient. Weight decay is a separate term.
_LINEAR = {torch.optim.SGD, torch.optim.ASGD}


def check_elementwise(
    optimizer: torch.optim.Optimizer, why: str, otherwise: str = "", *, but: AbstractSet[str] = frozenset()
) -> None:
    """Refuses an optimizer that may look at more than one element at a time.

    Args:
        optimizer: any.
        why: the reason; `{optimizer}` stands for its name.
        otherwise: another remedy.
        but: optimizers that do not help.
    """
    if type(optimizer) not in ELEMENTWISE:
        why, otherwise = (one.format(optimizer=type(optimizer).__name__) for one in (why, otherwise))
        names = {kind.__name__ for kind in ELEMENTWISE} - but
        raise UsageError(f"{why}: choose one of {', '.join(sorted(names))}{otherwise}.")


def check_served(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that servers cannot apply.

    A class other than PyTorch's can say `elementwise = True`, if it updates every element of a parameter from its own gradient
    and state alone.
    """
    if type(optimizer) is torch.optim.SparseAdam or _is_marked(type(optimizer)):
        return  # `check_rows` looks at SparseAdam's gradients
    check_elementwise(
        optimizer,
        "A server cannot apply {optimizer}, which it knows nothing of",
        "; or, if {optimizer} updates each element from its own gradient and state alone, say so by `elementwise = True` in"
        " the class; or local-sgd, whose workers step by their own optimizers",
    )


def _is_marked(kind: type) -> bool:
    """Whether the class itself says so: what a subclass does may differ."""
    return vars(kind).get("elementwise") is True


def _name_of(kind: type[torch.optim.Optimizer]) -> str:
    """One of PyTorch's by its name, another by its module's, too."""
    return (
        kind.__name__
        if kind.__name__ in _BY_NAME and not _is_marked(kind)
        else f"{kind.__module__}:{kind.__qualname__}"
    )


def _class_of(name: str) -> Any:
    """The inverse of `_name_of`.

    Raises:
        UsageError: this process cannot import it.
        ValueError: there is no such class, or it does not say that it is elementwise.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    if ":" not in name:
        raise ValueError(f"no optimizer {name!r}")
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"A server cannot import the optimizer {name.rpartition(':')[2]}: define its class at the top level of a module of"
            f" its own, beside the program, and import it from there ({error})."
        ) from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and _is_marked(found)):
        raise ValueError(f"no elementwise optimizer {name!r}")
    return found


def check_linear(optimizers: Iterable[torch.optim.Optimizer], option: str) -> None:
    """Refuses optimizers whose steps are not linear in the gradient, for an option that multiplies it; empty: none."""
    for one in optimizers:
        if option and type(one) not in _LINEAR:
            raise not_linear(option, type(one).__name__, "choose SGD, with momentum or without")


def check_no_line_search(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuses LBFGS: workers that choose their steps by their own losses diverge when the steps are combined."""
    if any(isinstance(one, torch.optim.LBFGS) for one in optimizers):
        raise UsageError(
            "LBFGS chooses its steps by the loss, so workers with different losses diverge: use another optimizer; "
            "or, with paceline.launch or torchrun, use lockstep or all-reduce (not sharded, without a codec), whose "
            "closures return the mean loss."
        )


def check_stateless(optimizers: Iterable[torch.optim.Optimizer], option: str) -> None:
    """Refuses optimizers that keep gradients in their state, if updates can be dropped afterwards."""
    for one in optimizers:
        if type(one) is not torch.optim.SGD or any(group["momentum"] for group in one.param_groups):
            with_momentum = " with momentum" if type(one) is torch.optim.SGD else ""
            raise UsageError(
                f"{option} gives up updates that lose too many races, but {type(one).__name__}{with_momentum} would keep their"
                " gradients in its state: use SGD without momentum, or leave out persistence."
            )


def not_linear(option: str, name: str, otherwise: str) -> UsageError:
    """The error for an option that multiplies gradients with an optimizer or rule that is not linear."""
    return UsageError(
        f"{option} scales every gradient by a factor of its own, but the steps of {name} do not scale with its "
        f"gradients: {otherwise}, or leave out {option.partition('=')[0]}."
    )


def check_rows(settings: OptimizerSettings, rows: Rows | None) -> None:
    """Refuses optimizers that cannot step with a gradient of these rows; None: it is dense."""
    known = dict(rows or {})
    without = {begin for begin, _ in settings.missing} | {table.begin for table, one in known.items() if one is None}
    sparse = {table.begin for table, one in known.items() if one is not None}
    for name, group in zip(settings.names, settings.groups, strict=True):
        values = dict(group.values)
        if name == "SparseAdam":
            if not {first for first, _ in group.ranges} <= without | sparse:
                raise UsageError(
                    "SparseAdam takes sparse gradients only: give parameters with dense ones another optimizer."
                )
            continue
        has_rows = any(first <= begin < last for first, last in group.ranges for begin in sparse)
        options = [key for key in ("momentum", "weight_decay") if values.get(key)]
        if has_rows and (name not in ("SGD", "Adagrad") or options):
            raise UsageError(
                "Servers apply sparse gradients by SparseAdam, or by Adagrad or SGD without momentum and weight decay; not by"
                f" {name}{' with ' + options[0] if options else ''}."
            )


class SettingsGroup(NamedTuple):
    """One parameter group: its elements of the flat vector (P,), and its settings."""

    ranges: tuple[tuple[int, int], ...]  # first element, and the one after the last
    values: tuple[tuple[str, Any], ...]  # learning rate, momentum, ..., as torch names them


class OptimizerSettings(NamedTuple):
    """Elementwise torch.optim optimizers as data: their classes and groups, with the current rates."""

    name: str  # the class; if groups differ in it, each group's, joined by +
    groups: tuple[SettingsGroup, ...]
    missing: Ranges = ()  # parameters without a gradient, which the next step leaves out

    @property
    def names(self) -> tuple[str, ...]:
        """Each group's class."""
        names = tuple(self.name.split("+"))
        return names * len(self.groups) if len(names) == 1 else names

    @property
    def learning_rate(self) -> float:
        """The first group's."""
        return dict(self.groups[0].values)["lr"]

    def to_tensor(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(json.dumps(self).encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, sent: torch.Tensor) -> OptimizerSettings:
        """The inverse of `to_tensor`.

        Raises:
            UsageError: this process cannot import the class.
            ValueError: the bytes are malformed.
        """
        name, groups, missing = json.loads(bytes(sent.tolist()))
        groups = tuple(SettingsGroup(_tuples(ranges), _tuples(values)) for ranges, values in groups)
        settings = cls(str(name), groups, _tuples(missing))
        if len(settings.names) != len(groups):
            raise ValueError(f"{len(groups)} groups of {name!r}")
        for one in set(settings.names):
            _class_of(one)
        return settings

    def check(self, num_parameters: int) -> None:
        """Checks that the optimizer can be built for a vector of `num_parameters` elements.

        Raises:
            TypeError, ValueError: it cannot.
        """
        if not self.groups:
            raise ValueError("no groups")
        for first, last in (*self.missing, *(own for group in self.groups for own in group.ranges)):
            if not (type(first) is type(last) is int and 0 <= first <= last <= num_parameters):
                raise ValueError(f"elements {first} to {last} of {num_parameters}")
        for name, group in zip(self.names, self.groups, strict=True):
            values = dict(group.values)
            rate = values.pop("lr", None)
            if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
                raise ValueError(f"a learning rate of {rate}")
            _check_values(name, tuple(values.items()))


@functools.lru_cache(maxsize=64)  # learning rates change, and little else does
def _check_values(name: str, values: tuple[tuple[str, Any], ...]) -> None:
    """Checks the values by the optimizer's own checks, and by the types of its defaults."""
    kind, own, probe = _class_of(name), dict(values), [nn.Parameter(torch.zeros(1))]
    defaults, known = kind(probe, lr=1e-3).defaults, inspect.signature(kind).parameters.keys()
    if own and not own.keys() >= defaults.keys() - {"lr"}:  # where only time is simulated there is a rate alone
        raise ValueError(f"no {sorted(defaults.keys() - own.keys() - {'lr'})}")
    for key in own.keys() & defaults.keys():
        if not _is_alike(own[key], defaults[key]):
            raise TypeError(f"{key}={own[key]!r}")
    kind(probe, lr=1e-3, **{key: own[key] for key in own.keys() & defaults.keys() & known})


def _is_alike(value: Any, default: Any) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, tuple) and len(value) == len(default) and all(map(_is_alike, value, default))
    if default is None or isinstance(default, bool):
        return value is None or isinstance(value, bool)
    return isinstance(value, int | float) and math.isfinite(value)


def settings_of(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    ranges: Callable[[nn.Parameter], tuple[int, int] | None],
) -> OptimizerSettings:
    """An optimizer as data, or several that step together.

    Costs: a few microseconds per group, and per parameter.

    Args:
        optimizer: the user's.
        ranges: where a parameter lies in the flat vector; None: it is not trained.

    Raises:
        UsageError: it is a user-defined class, or one whose step needs whole parameters.
    """
    names, groups = [], []
    for one in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer:
        check_served(one)
        for group in one.param_groups:
            known = one.defaults if is_from_torch(one) else group  # a loop may have added entries of its own
            values = {key: _plain(value) for key, value in group.items() if key in known and key != "params"}
            values |= {"capturable": False} if "capturable" in values else {}  # a server is on the CPU
            own = tuple(filter(None, map(ranges, group["params"])))
            groups.append(SettingsGroup(own, tuple(values.items())))
            names.append(_name_of(type(one)))
    return OptimizerSettings("+".join(names if len(set(names)) > 1 else names[:1]), tuple(groups))


def state_of(
    optimizers: Sequence[torch.optim.Optimizer],  # the user's
    # Where a parameter lies in the flat vector; None: it is not trained.
    ranges: Callable[[nn.Parameter], tuple[int, int] | None],
    num_elements: int,  # of that vector
) -> dict[str, torch.Tensor]:
    """Optimizers' state, such as momentum, in the form of `as_vectors`, for the whole flat vector; empty: none."""
    found: dict[str, list[tuple[slice, dict[str, Any]]]] = {}
    for optimizer in optimizers:
        own = found.setdefault(_name_of(type(optimizer)), [])
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if (where := ranges(parameter)) is not None:
                state = {key: _in_order(one, parameter) for key, one in optimizer.state.get(parameter, {}).items()}
                own.append((slice(*where), state))
    return named({name: as_vectors(states, num_elements) for name, states in found.items()})


def _in_order(value: Any, parameter: nn.Parameter) -> Any:
    """A tensor with the parameter's shape as a vector, in the order of the parameter's elements in memory."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    dims = sorted(range(value.dim()), key=lambda dim: -parameter.stride(dim))
    return value.permute(dims).flatten() if dims else value


def named(states: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The state of one optimizer; of several, the names begin with the optimizer's."""
    if len(states) == 1:
        return next(iter(states.values()))
    return {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}


def as_vectors(states: list[tuple[slice, dict[str, Any]]], num_elements: int) -> dict[str, torch.Tensor]:
    """Joins the states of a vector's parts into vectors (n,); a number that is equal for all parts stays a number."""
    found: dict[str, torch.Tensor] = {}
    for key in {key: None for _, state in states for key in state}:
        values = [(part, torch.as_tensor(state[key])) for part, state in states if state.get(key) is not None]
        # Else those of parameters without dimensions are elements.
        are_numbers = not any(value.dim() for _, value in values)
        if are_numbers and len(values) == len(states) and len({value.item() for _, value in values}) == 1:
            found[key] = values[0][1].clone()
        elif values:
            found[key] = torch.zeros(num_elements, dtype=values[0][1].dtype)
            for part, value in values:
                found[key][part] = value.flatten() if value.dim() else value
    if found and not all(state for _, state in states):
        found["without_state"] = torch.zeros(num_elements, dtype=torch.float32)
        for part, state in states:
            found["without_state"][part] = float(not state)
    return found


def make_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of these settings' `name`."""
    return _class_of(name)(groups)


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The optimizer's own step without PyTorch's wrappers (profiler range, hooks, gradient mode): the caller is under no_grad.

    The wrappers cost about a tenth of a small model's step. A user-defined class keeps them: it may rely on them.
    """
    if is_from_torch(optimizer):
        return inspect.unwrap(type(optimizer).step).__get__(optimizer)
    return optimizer.step


def is_from_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class is one of PyTorch's, and not user-defined."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def scaled_step(step: Callable[[], Any], optimizer: torch.optim.Optimizer, scale: float) -> None:
    """One step with every learning rate multiplied by `scale` for its duration."""
    if scale == 1.0:
        step()
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * scale
        step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is `x -= lr * g` and nothing else."""
    extras = ("momentum", "weight_decay", "nesterov", "maximize", "differentiable", "fused")
    return type(optimizer) is torch.optim.SGD and not any(optimizer.defaults[extra] for extra in extras)


def cut_state(state: dict[str, Any], elements: slice) -> dict[str, Any]:
    """An optimizer's state for some of a vector's elements: views of per-element entries, copies of the rest."""
    return {
        name: (value[elements] if value.dim() else value.clone()) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value  # as tensors and NumPy's numbers have


def _tuples(value: Sequence[Any]) -> Any:
    return tuple(_tuples(one) if isinstance(one, list) else one for one in value)
