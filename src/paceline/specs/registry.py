"""Specs: algorithms, partitions and optimizers written as text, such as `leashed(persistence=2, backoff=linear)`.

A `Registry` turns a spec into a frozen dataclass and back; `build_optimizer` turns one into a torch.optim optimizer.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import UsageError
from paceline.specs.bounds import as_float
from paceline.specs.text import NAME, Spec, Value, closest, parse_spec, value_text

if TYPE_CHECKING:
    import torch

_MISSING: Any = object()


class Registry:
    """Names of one kind of frozen dataclass, and the way from text to instance and back.

    `registry.build(registry.spec(a)) == a` for every instance that a spec can express.

    Args:
        kind: what the entries are, for messages: "algorithm", "back-off", ...
        nested: for fields annotated with a base class, the registry that holds its subclasses.
    """

    def __init__(self, kind: str = "spec", *, nested: Mapping[type, Registry] | None = None) -> None:
        self.kind = kind
        self._nested = dict(nested or {})
        self._classes: dict[str, type] = {}

    def register(self, name: str, cls: type) -> type:
        """Add a frozen dataclass under a name and return it; names and classes are registered once."""
        if not NAME.fullmatch(name):
            raise ValueError(f"'{name}' cannot be a spec's name: letters, digits, '-', '_' and '.' only")
        if not dataclasses.is_dataclass(cls):
            raise ValueError(f"{cls.__name__} must be a dataclass to be registered as '{name}'")
        if name in self._classes or cls in self._classes.values():
            raise ValueError(f"{self.kind} '{name}' or its class {cls.__name__} is already registered")
        self._classes[name] = cls
        return cls

    def names(self) -> list[str]:
        return list(self._classes)

    def items(self) -> list[tuple[str, type]]:
        """The registered (name, class) pairs, in order of registration."""
        return list(self._classes.items())

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, name: str) -> type:
        """The class of this name; UsageError names the closest match."""
        if name not in self._classes:
            known = ", ".join(self._classes) or "none yet"
            raise UsageError(f"Unknown {self.kind} '{name}'.{closest(name, self._classes)} Known: {known}.")
        return self._classes[name]

    def name_of(self, cls: type) -> str:
        """The name of a class; of one that users cannot choose, its own `unlisted_name`."""
        for name, registered in self._classes.items():
            if registered is cls:
                return name
        if name := getattr(cls, "unlisted_name", ""):
            return name
        raise UsageError(f"{cls.__name__} is not a registered {self.kind}; register it first.")

    def build(self, text_or_spec: str | Spec) -> Any:
        """Build the instance that a spec describes.

        Raises:
            UsageError: unknown name or argument, or a value of the wrong type or out of range.
        """
        spec = parse_spec(text_or_spec) if isinstance(text_or_spec, str) else text_or_spec
        cls = self[spec.name]
        fields, hints = _init_fields(cls), _type_hints(cls)
        arguments = {}
        for key, value in spec.arguments.items():
            if key not in fields:
                if reason := getattr(cls, "refused_arguments", {}).get(key):
                    raise UsageError(f"'{spec.name}' cannot have {key}: {reason}.")
                valid = f"Valid: {', '.join(fields)}." if fields else "It takes none."
                raise UsageError(f"'{spec.name}' has no argument '{key}'.{closest(key, fields)} {valid}")
            arguments[key] = self._convert(f"'{spec.name}' argument '{key}'", hints[key], value)
        missing = [key for key, item in fields.items() if key not in arguments and _default(item) is _MISSING]
        if missing:
            raise UsageError(f"'{spec.name}' needs {missing[0]}: write {spec.name}({missing[0]}=...).")
        try:
            return cls(**arguments)
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(f"'{spec}' is invalid: {error}") from error

    def spec(self, instance: Any, *, defaults: bool = False) -> str:
        """The canonical text of an instance; arguments equal to their default are left out unless `defaults`."""
        cls = type(instance)
        hints = _type_hints(cls)
        arguments = {}
        for key, item in _init_fields(cls).items():
            value = getattr(instance, key)
            if defaults or value != _default(item):
                arguments[key] = self._text(f"{cls.__name__}.{key}", hints[key], value, defaults=defaults)
        name = self.name_of(cls)
        return f"{name}({', '.join(f'{key}={text}' for key, text in arguments.items())})" if arguments else name

    def template(self, name: str) -> str:
        """The spec of a name with every default written out, and `...` for arguments without one; for help and tables."""
        cls = self[name]
        hints = _type_hints(cls)
        arguments = []
        for key, item in _init_fields(cls).items():
            default = _default(item)
            expressible = default is not _MISSING and self._expressible(hints[key], default)
            text = self._text(f"{cls.__name__}.{key}", hints[key], default, defaults=True) if expressible else "..."
            arguments.append(f"{key}={text}")
        return f"{name}({', '.join(arguments)})" if arguments else name

    def _nested_registry(self, hint: Any) -> Registry | None:
        if not isinstance(hint, type):
            return None
        if hint in self._nested:
            return self._nested[hint]
        return next((registry for base, registry in self._nested.items() if issubclass(hint, base)), None)

    def _convert(self, where: str, hint: Any, value: Value) -> Any:
        members = _members(hint)
        failure: UsageError | None = None
        for member in sorted(members, key=lambda one: one is not type(None)):  # `none` means None where that is allowed
            registry = self._nested_registry(member)
            if registry is None:
                found, converted = _convert_plain(member, value)
                if found:
                    return converted
            elif isinstance(value, Spec | str) or _word(value) in registry:
                try:
                    return registry.build(value if isinstance(value, Spec) else Spec(_word(value)))
                except UsageError as error:
                    failure = UsageError(f"{where}: {error}")
        if failure is not None:
            raise failure
        if all(self._nested_registry(member) is None and not _is_plain(member) for member in members):
            raise UsageError(f"{where} cannot be written in a spec; set it from Python.")
        expected = " or ".join(self._expected(member) for member in members)
        hint_text = closest(_word(value), get_args(members[0])) if get_origin(members[0]) is Literal else ""
        raise UsageError(f"{where} must be {expected}, not '{value_text(value)}'.{hint_text}")

    def _expected(self, member: Any) -> str:
        registry = self._nested_registry(member)
        if registry is not None:
            return f"one of {', '.join(registry)}"
        if get_origin(member) is Literal:
            return f"one of {', '.join(_word(one) for one in get_args(member))}"
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "none"}
        return names.get(member, str(member))

    def _expressible(self, hint: Any, value: Any) -> bool:
        try:
            self._text("", hint, value, defaults=False)
        except UsageError:
            return False
        return True

    def _text(self, where: str, hint: Any, value: Any, *, defaults: bool) -> str:
        members = _members(hint)
        for registry in map(self._nested_registry, members):
            if registry is not None and type(value) in registry._classes.values():
                text = registry.spec(value, defaults=defaults)
                return f"{text}()" if text == "none" and type(None) in members else text
        text = value_text(value) if isinstance(value, int | float | str | None) else ""
        try:
            same = self._convert(where, hint, parse_spec(f"x(y={text})").arguments["y"])
        except UsageError:
            same = _MISSING
        if same is _MISSING or same != value:
            raise UsageError(f"{where} = {value!r} cannot be written in a spec; set it from Python.")
        return text


def check_optimizer(
    spec_text: str,
    learning_rate: float | None = None,
    momentum: float | None = None,
    *,
    parameters: Iterable[torch.nn.Parameter] | None = None,
) -> list[torch.optim.Optimizer]:
    """Refuses what `build_optimizer` would refuse for a model's parameters, or, if there are none yet, for a matrix.

    Returns a list of the built optimizer; it is empty for plain SGD, which needs no check, because the first torch optimizer
    takes 1.5 s to build: it imports the compiler.
    """
    import torch

    if spec_text == "sgd" and (learning_rate or 0.0) >= 0 and (momentum or 0.0) >= 0:
        return []
    if parameters is None:
        parameters = [torch.nn.Parameter(torch.zeros(2, 2))]
    return [build_optimizer(spec_text, parameters, learning_rate, momentum)]


def build_optimizer(
    spec_text: str,
    parameters: Iterable[torch.nn.Parameter],
    learning_rate: float | None = None,
    momentum: float | None = None,
) -> torch.optim.Optimizer:
    """Build the torch.optim optimizer that a spec names, such as `sgd` or `adamw(weight_decay=0.1)`.

    Args:
        spec_text: a torch.optim class by case-insensitive name, with its constructor's arguments; pairs of betas are
            written `beta1=0.9, beta2=0.99`.
        parameters: to optimize.
        learning_rate: overrides `lr`; None keeps the spec's or torch's default.
        momentum: overrides `momentum` for classes that have it.

    Raises:
        UsageError: unknown optimizer or argument, or a value that torch refuses.
    """
    import torch

    spec = parse_spec(spec_text)
    classes = {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    refused = {
        "lbfgs": "it evaluates the loss several times per step, which no parallel algorithm here can follow",
        "sparseadam": "it needs sparse gradients, and the workers' gradients are dense",
    }
    name = spec.name.lower()
    if name in refused:
        raise UsageError(f"Optimizer '{spec.name}' cannot be used: {refused[name]}; choose sgd, adam or adamw.")
    if name not in classes:
        known = ", ".join(sorted(set(classes) - set(refused)))
        raise UsageError(f"Unknown optimizer '{spec.name}'.{closest(name, classes)} Known: {known}.")
    signature = dict(list(inspect.signature(classes[name]).parameters.items())[1:])  # without `params`
    arguments = _optimizer_arguments(spec, signature)
    if learning_rate is not None:
        arguments["lr"] = learning_rate
    if momentum is not None and "momentum" in signature:
        arguments["momentum"] = momentum
    elif momentum:
        raise UsageError(f"Optimizer '{spec.name}' has no momentum; leave --momentum out or choose sgd or rmsprop.")
    try:
        return classes[name](parameters, **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"Optimizer '{spec}' is invalid: {error}") from error


def _optimizer_arguments(spec: Spec, signature: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    valid = [key for key, item in signature.items() if not isinstance(item.default, tuple)]
    betas = list(signature["betas"].default) if "betas" in signature else []
    valid += [f"beta{index + 1}" for index in range(len(betas))]
    arguments: dict[str, Any] = {}
    for key, value in spec.arguments.items():
        if key not in valid:
            raise UsageError(
                f"Optimizer '{spec.name}' has no argument '{key}'.{closest(key, valid)} Valid: {', '.join(valid)}."
            )
        default = signature[key].default if key in signature else 0.0
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(default, bool) and not isinstance(value, bool):
            raise UsageError(f"Optimizer '{spec.name}' argument '{key}' must be true or false, not '{value}'.")
        if isinstance(default, int | float) and not isinstance(default, bool) and not is_number:
            raise UsageError(f"Optimizer '{spec.name}' argument '{key}' must be a number, not '{value_text(value)}'.")
        if key in signature:
            arguments[key] = value
        else:
            betas[int(key.removeprefix("beta")) - 1] = value
            arguments["betas"] = tuple(betas)
    return arguments


_type_hints = cache(get_type_hints)


def _init_fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {item.name: item for item in dataclasses.fields(cls) if item.init}


def _default(item: dataclasses.Field[Any]) -> Any:
    factory: Callable[[], Any] | Any = item.default_factory
    if item.default is not dataclasses.MISSING:
        return item.default
    return factory() if factory is not dataclasses.MISSING else _MISSING


def _members(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _is_plain(member: Any) -> bool:
    return member in (int, float, bool, str, type(None)) or get_origin(member) is Literal


def _word(value: Value) -> str:
    return value if isinstance(value, str) else value_text(value)


def _convert_plain(member: Any, value: Value) -> tuple[bool, Any]:
    """Whether a plain annotation accepts the value, and the converted value."""
    is_bool = isinstance(value, bool)
    if member is type(None):
        return value is None, None
    if get_origin(member) is Literal:
        for one in get_args(member):
            if (type(one) is type(value) and one == value) or (isinstance(one, str) and one == _word(value)):
                return True, one
        return False, None
    if member is bool:
        return is_bool, value
    if member is int:
        return isinstance(value, int) and not is_bool, value
    if member is float:
        is_number = isinstance(value, int | float) and not is_bool
        return is_number, as_float(value) if is_number else None
    if member is str:
        return not isinstance(value, Spec), _word(value)
    return False, None
