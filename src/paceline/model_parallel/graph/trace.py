"""A model's forward pass as a torch.fx graph of operations, with their results on an example: shapes, state, aliases."""

from __future__ import annotations

import copy
import hashlib
import inspect
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import UsageError, first_line
from paceline.system.torch_internals import is_assert
from paceline.system.torch_random import torch_state, torch_undisturbed

_OURS, _TORCH = Path(__file__).parents[2], Path(torch.__file__).parent
_SHAPE_METHODS = ("size", "dim", "numel", "ndimension", "stride")
_SHAPE_ATTRIBUTES = ("shape", "dtype", "device", "ndim")
_PLAIN = (int, float, bool, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class Node:
    """One operation of the forward pass, as recorded with the example."""

    name: str  # in the graph
    inputs: tuple[str, ...]  # names of the operations and inputs that it reads
    state: tuple[str, ...]  # names of the parameters and buffers that it uses
    storages: frozenset[int]  # ids of the memory of its values and of the values that it has changed in place
    changes: frozenset[int]  # the subset of these that it has changed in place
    num_bytes: int  # of its value; 0: it is not a single tensor
    shape: tuple[int, ...]  # of its value
    dtype: str  # of its value, by its name in torch
    is_tensor: bool  # whether its value is one tensor, which can be sent
    has_gradient: bool  # whether it receives a gradient
    is_random: bool  # whether it drew random numbers
    is_local: bool  # depends only on the model's inputs and shares their memory: every worker computes it by itself
    path: str  # of the module that contains it or that it calls
    line: str  # its place in the user's code


@dataclass(frozen=True)
class Traced:
    """A model's graph and its analysis."""

    graph: fx.Graph  # torch.fx's; values that follow from shapes are constants
    nodes: tuple[Node, ...]  # its operations, in order
    outputs: tuple[str, ...]  # names of the operations that the model returns
    constants: dict[str, Any]  # values that follow from shapes, by name
    inputs: tuple[tuple[tuple[int, ...], str], ...]  # shape and type of each tensor of the example
    values: dict[str, Any]  # of the example, by name; kept for measuring
    digest: str  # of the graph's text; identifies the model


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self.record_stack_traces = True
        self.proxy_buffer_attributes = True
        self._modes = _modes()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise UsageError(
                f"forward computes without gradients or under autocast at {_users_line(traceback.extract_stack())}, "
                "which its graph would not do: use detach(), freeze parameters and cast tensors instead, or put that "
                "code into a function marked with torch.fx.wrap."
            )
        return super().create_node(*args, **kwargs)


def _modes() -> tuple[bool, ...]:
    """Global modes that change how operations compute."""
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def arguments_of(model: nn.Module, example: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """An example (a tensor, a tuple, or named arguments) as arguments of the model's `forward`, by name; and the defaults.

    Raises:
        UsageError: `forward` has other arguments.
    """
    signature = inspect.signature(model.forward)
    given, named = ((), dict(example)) if isinstance(example, Mapping) else (example, {})
    given = tuple(given) if isinstance(given, tuple | list) else (given,)
    try:
        bound = signature.bind(*given, **named)
    except TypeError as error:
        raise UsageError(
            f"The example does not fit {type(model).__name__}.forward{signature}: {first_line(error)}."
        ) from None
    if any(signature.parameters[one].kind in (2, 4) for one in bound.arguments):
        raise UsageError(
            f"{type(model).__name__}.forward takes *args or **kwargs, whose number a graph cannot know: name its "
            "arguments."
        )
    arguments = dict(bound.arguments)
    bound.apply_defaults()
    rest = {
        k: v for k, v in bound.arguments.items() if k not in arguments and signature.parameters[k].kind not in (2, 4)
    }
    return arguments, rest


def trace_graph(model: nn.Module, defaults: Mapping[str, Any]) -> fx.Graph:
    """The model's graph, in its current mode; its leaves are torch's own modules, and `defaults` are constants.

    Raises:
        UsageError: the model's control flow depends on computed values; the message names the line.
    """
    for name in [one for one in vars(model) if one.startswith("_tensor_constant")]:
        delattr(model, name)  # from an earlier trace: a new graph numbers its names from 0
    state = torch_state()
    try:
        graph = _Tracer().trace(model, concrete_args=dict(defaults) or None)
    except UsageError:
        raise
    except RecursionError as error:
        raise UsageError(f"{type(model).__name__} has no graph: its forward calls itself endlessly.") from error
    except Exception as error:  # user code may raise anything on proxy values
        line = _users_line(traceback.extract_tb(error.__traceback__))
        raise UsageError(
            f"{type(model).__name__} has no graph: at {line} its code depends on a tensor's value or kind "
            f"({first_line(error)}); move that code out of forward, or into a function marked with torch.fx.wrap."
        ) from error
    if not torch.equal(state, torch_state()):
        torch.set_rng_state(state)
        raise UsageError(
            f"{type(model).__name__} draws random numbers that depend on no input, so its graph would draw the same "
            "ones in every step: draw them from a tensor's shape, as torch.randn_like does."
        )
    for node in list(graph.nodes):  # the checks that torch.fx adds for unchanged defaults
        if node.op == "call_function" and is_assert(node.target):
            graph.erase_node(node)
    _follow_changes(graph, model)
    graph.eliminate_dead_code(_has_effect)
    return graph


def replace_constants(graph: fx.Graph, constants: Mapping[str, Any]) -> None:
    """Replaces operations whose values follow from shapes by these values."""
    for node in list(graph.nodes):
        if node.name in constants:
            _replace(graph, node, constants[node.name])


def trace(model: nn.Module, example: Any) -> Traced:
    """Traces a model in its current mode and runs a copy of it once on the example.

    Costs: a copy of the model, and one forward pass.

    Raises:
        UsageError: the model cannot be traced, or fails on the example.
    """
    arguments, defaults = arguments_of(model, example)
    graph = trace_graph(model, defaults)
    twin = copy.deepcopy(model)  # with the constants that tracing has added
    text = digest(graph)
    run = _Recorder(twin, graph, {id(one): name for name, one in (*twin.named_parameters(), *twin.named_buffers())})
    with torch_undisturbed(), torch.enable_grad():
        try:
            run.run_with(arguments)
        except Exception as error:
            raise UsageError(f"{type(model).__name__} fails on the example: {first_line(error)}.") from error
    replace_constants(graph, run.constants)
    kept = {node.name for node in graph.nodes}
    nodes = tuple(one for one in run.nodes if one.name in kept)
    last = next(node for node in graph.nodes if node.op == "output")
    outputs = tuple(dict.fromkeys(one.name for one in last.all_input_nodes))
    kinds = {one.name: one for one in nodes}
    for name in outputs:
        if name in kinds and not kinds[name].is_tensor:
            raise UsageError(
                f"{type(model).__name__} returns {name}, which is not a tensor but a "
                f"{type(run.values[name]).__name__}: return tensors, alone or in a tuple, list or dict."
            )
    shapes = tuple((tuple(one.shape), str(one.dtype)) for value in arguments.values() for one in tensors_in(value))
    return Traced(graph, nodes, outputs, run.constants, shapes, run.values, text)


def digest(graph: fx.Graph) -> str:
    """A digest of a graph's operations and their connections."""
    lines = [f"{n.op} {n.name} {n.target if isinstance(n.target, str) else getattr(n.target, '__name__', '')} {n.args}"
             for n in graph.nodes]  # fmt: skip
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tensor, or in a tuple, list or dict."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)


class _Recorder(fx.Interpreter):
    """Runs a graph on an example and records each operation."""

    def __init__(self, model: nn.Module, graph: fx.Graph, names: Mapping[int, str]) -> None:
        super().__init__(model, garbage_collect_values=False, graph=graph)
        self._names = names
        self.nodes: list[Node] = []
        self.constants: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self._storages: dict[int, int] = {}
        self._held: list[Any] = []  # keeps values with an id alive, so that their addresses are not reused
        self._local: set[str] = set()

    def run_with(self, arguments: Mapping[str, Any]) -> None:
        graph: Any = self.graph
        placeholders = [node.target for node in graph.nodes if node.op == "placeholder"]
        self.run(*(arguments.get(str(name)) for name in placeholders))

    def run_node(self, n: fx.Node) -> Any:
        read = [self.env[one] for one in n.all_input_nodes]
        before = [(one, one._version) for value in read for one in tensors_in(value)]
        state = torch_state()
        value = super().run_node(n)
        self.values[n.name] = value
        if n.op == "placeholder":
            self._local.add(n.name)
        if n.op in ("placeholder", "output", "get_attr"):
            if n.op == "get_attr":
                self._storage_ids(value)
            return value
        if self._follows_from_shapes(n, value):
            self.constants[n.name] = value
            return value
        self._note(n, value, before, is_random=not torch.equal(state, torch_state()))
        return value

    def _note(self, n: fx.Node, value: Any, before: list[tuple[torch.Tensor, int]], *, is_random: bool) -> None:
        changes = frozenset(i for one, version in before if one._version != version for i in self._storage_ids(one))
        own = self._storage_ids(value)
        states = tuple(dict.fromkeys(self._states(n)))
        inputs = [one for one in n.all_input_nodes if one.op != "get_attr" and one.name not in self.constants]
        of_inputs = {i for one in inputs for i in self._storage_ids(self.values[one.name])}
        is_local = (
            not states and not is_random and not changes and bool(inputs)
            and all(one.name in self._local for one in inputs) and own <= of_inputs
        )  # fmt: skip
        if is_local:
            self._local.add(n.name)
        is_tensor = isinstance(value, torch.Tensor)
        self.nodes.append(
            Node(
                name=n.name,
                inputs=tuple(one.name for one in inputs),
                state=states,
                storages=own | changes,
                changes=changes,
                num_bytes=value.nbytes if is_tensor else 0,
                shape=tuple(value.shape) if is_tensor else (),
                dtype=str(value.dtype).removeprefix("torch.") if is_tensor else "",
                is_tensor=is_tensor,
                has_gradient=is_tensor and value.requires_grad,
                is_random=is_random,
                is_local=is_local,
                path=_path_of(n),
                line=_line_of(n),
            )
        )

    def _states(self, n: fx.Node) -> Iterator[str]:
        if n.op == "call_module":
            module = self.fetch_attr(str(n.target))
            for one in (*module.parameters(), *module.buffers()):
                yield self._names[id(one)]
        for one in n.all_input_nodes:
            if one.op == "get_attr" and (name := self._names.get(id(self.values[one.name]))) is not None:
                yield name

    def _storage_ids(self, value: Any) -> frozenset[int]:
        found = set()
        for one in tensors_in(value):
            storage = one.untyped_storage()
            if storage.nbytes():
                self._held.append(storage)
                found.add(self._storages.setdefault(storage.data_ptr(), len(self._storages)))
        return frozenset(found)

    def _follows_from_shapes(self, n: fx.Node, value: Any) -> bool:
        parts = value if isinstance(value, tuple | list) else (value,)
        if not all(isinstance(one, _PLAIN) for one in parts):
            return False
        reads_shape = (n.op == "call_method" and n.target in _SHAPE_METHODS) or (
            n.op == "call_function" and n.target is getattr and n.args[1] in _SHAPE_ATTRIBUTES
        )
        known = [one.name in self.constants for one in n.all_input_nodes]
        return reads_shape or (bool(known) and all(known))


def _replace(graph: fx.Graph, node: fx.Node, value: Any) -> None:
    constant: Callable[[fx.Node], Any] = lambda one: value if one is node else one  # noqa: E731
    for user in list(node.users):
        user.args = fx.map_arg(user.args, constant)
        user.kwargs = fx.map_arg(user.kwargs, constant)
    graph.erase_node(node)


def _follow_changes(graph: fx.Graph, model: nn.Module) -> None:
    """Makes readers of a tensor that come after an in-place operation read that operation's result instead."""
    at = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
        changes = node.op != "call_module" and name.endswith("_") and not name.endswith("__")
        changes |= node.kwargs.get("inplace") is True
        changes |= node.op == "call_module" and getattr(model.get_submodule(str(node.target)), "inplace", False) is True
        if changes and node.args and isinstance(node.args[0], fx.Node):
            node.args[0].replace_all_uses_with(node, lambda user, end=at[node]: at[user] > end)


def _has_effect(node: fx.Node) -> bool:
    """Whether torch.fx must keep a node without readers: calls that may change a tensor in place."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", "")).endswith("_") or node.target in (operator.setitem,)
    return node.op == "call_module" or (node.op == "call_method" and str(node.target).endswith("_"))


def _path_of(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _line_of(node: fx.Node) -> str:
    lines = [one for one in (node.stack_trace or "").splitlines() if one.strip().startswith("File ")]
    for one in reversed(lines):
        file, _, rest = one.strip()[len('File "') :].partition('", line ')
        if _TORCH not in Path(file).parents and _OURS not in Path(file).parents:
            return f"{Path(file).name}:{rest.split(',')[0]}"
    return ""


def _users_line(frames: traceback.StackSummary) -> str:
    own = [f for f in frames if _TORCH not in Path(f.filename).parents and _OURS not in Path(f.filename).parents]
    return f"line {own[-1].lineno} of {own[-1].filename}" if own else "a place that torch.fx does not name"
