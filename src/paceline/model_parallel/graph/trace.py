"""Operations of a model's graph, as recorded on an example: shapes, state, aliases."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import UsageError, first_line
from paceline.model_parallel.graph.capture import (
    GraphRunner,
    about_none,
    arguments_of,
    digest,
    line_of,
    replace_constants,
    text_of,
    trace_graph,
)
from paceline.system.torch_internals import backward_hooks, forward_hooks
from paceline.system.torch_random import torch_state, torch_undisturbed

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
    digest: str  # identifies the model
    text: str  # its operations with all arguments


def trace(model: nn.Module, example: Any) -> Traced:
    """Traces a model in its current mode and runs a copy of it once on the example.

    Costs: a copy of the model, and one forward pass.

    Raises:
        UsageError: the model cannot be traced, fails on the example, or changes it.
    """
    arguments, given = arguments_of(model, example)
    if backward_hooks(model) or forward_hooks(model):
        raise UsageError(
            f"{type(model).__name__} has hooks, which its graph would not call: put them on a module of torch.nn, or call "
            "them in forward."
        )
    graph = trace_graph(model, given)
    twin = copy.deepcopy(model)  # with the constants that tracing has added
    text = "\n".join(map(text_of, graph.nodes))
    run = _Recorder(twin, graph, {id(one): name for name, one in (*twin.named_parameters(), *twin.named_buffers())})
    with torch_undisturbed(), torch.enable_grad(), inputs_unchanged(model, arguments):
        try:
            run.run(*(arguments.get(str(node.target)) for node in graph.nodes if node.op == "placeholder"))
        except Exception as error:
            why = f"{first_line(error)}{about_none(arguments, error)}"
            raise UsageError(f"{type(model).__name__} fails on the example: {why}.") from error
    identity = digest(graph, run.constants)
    replace_constants(graph, run.constants)
    kept = {node.name for node in graph.nodes}
    last = next(node for node in graph.nodes if node.op == "output")
    outputs = tuple(dict.fromkeys(one.name for one in last.all_input_nodes))
    nodes = _with_gradients([one for one in run.nodes if one.name in kept], outputs)
    kinds = {one.name: one for one in nodes}
    for name in outputs:
        if name in kinds and not kinds[name].is_tensor:
            raise UsageError(
                f"{type(model).__name__} returns {name} of type {type(run.values[name]).__name__}, "
                "which is not a tensor: return tensors, alone or in a tuple, list or dict."
            )
    shapes = tuple((tuple(one.shape), str(one.dtype)) for value in arguments.values() for one in tensors_in(value))
    return Traced(graph, nodes, outputs, run.constants, shapes, run.values, identity, text)


def _with_gradients(nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[Node, ...]:
    """Only values get a gradient from which others that need one lead to an output, also by changes in place."""
    need, get = [one for one in reversed(nodes) if one.has_gradient], set[str]()
    read, storages, before = set(outputs), set[int](), -1
    while len(get) > before:
        before = len(get)
        for one in need:
            if one.name in read or one.storages & storages:
                get.add(one.name)
                read.update(one.inputs)
                storages |= one.storages
    return tuple(replace(one, has_gradient=one.name in get) for one in nodes)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tensor, or in a tuple, list or dict."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)


def own_copy(example: Any) -> Any:
    """A copy of an example, whatever contains its tensors: each is copied without its history, and a view without its base."""
    fresh = {id(one): one.detach().clone().requires_grad_(one.requires_grad) for one in tensors_in(example)}
    return copy.deepcopy(example, fresh)


@contextmanager
def inputs_unchanged(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Refuses a model that changes its inputs, which the loop and other workers may read, in a run on these arguments."""
    found = [(name, one, one._version) for name, value in arguments.items() for one in tensors_in(value)]
    yield
    if names := [name for name, one, version in found if one._version != version]:
        raise UsageError(
            f"forward of {type(model).__name__} changes its input {names[0]} in place, while the loop and other workers may "
            "read it: change a copy, as x = x + 1 does instead of x += 1, or begin with x = x.clone()."
        )


class _Recorder(GraphRunner):
    def __init__(self, model: nn.Module, graph: fx.Graph, names: Mapping[int, str]) -> None:
        super().__init__(model, graph)
        self._names = names
        self.nodes: list[Node] = []
        self.constants: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self._storages: dict[int, int] = {}
        self._held: list[Any] = []  # keeps values with an id alive, so that their addresses are not reused
        self._local: set[str] = set()

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
                has_gradient=any(one.requires_grad for one in tensors_in(value)),
                is_random=is_random,
                is_local=is_local,
                path=_path_of(n),
                line=line_of(n),
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


def _path_of(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""
