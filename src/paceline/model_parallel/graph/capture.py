"""A model's forward pass as a torch.fx graph, whose operations keep the modes in which the model runs them.

`torch.export` would drop the backward pass of a custom `torch.autograd.Function` and backward hooks of modules, make an
indivisible operation of each `no_grad` region, and take seconds in each worker, where a trace takes milliseconds.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import threading
import traceback
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from paceline.errors import UsageError, first_line
from paceline.model_parallel.graph.attributes import changed, values_of
from paceline.system.torch_internals import autocast_depth, backward_hooks, is_assert, tree_leaves
from paceline.system.torch_random import torch_state

_OURS, _TORCH = Path(__file__).parents[2], Path(torch.__file__).parent
_tracing = threading.Lock()  # torch.fx replaces methods of nn.Module meanwhile


class Modes(NamedTuple):
    """Modes that change how an operation computes, or whether it has a gradient."""

    with_gradient: bool  # False in inference mode, too, whose tensors have no counter of changes
    autocast: tuple[int, bool, torch.dtype]  # on the CPU: depth of the contexts, whether it is on, and its type

    @classmethod
    def now(cls) -> Modes:
        on, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return cls(torch.is_grad_enabled(), (autocast_depth(), on, dtype))

    @contextmanager
    def entered(self, outside: Modes) -> Iterator[None]:
        """These modes, where they differ from those `outside` of the forward pass that was traced."""
        with ExitStack() as stack:
            if not self.with_gradient:
                stack.enter_context(torch.no_grad())
            if self.autocast != outside.autocast:
                _, on, dtype = self.autocast
                stack.enter_context(torch.autocast("cpu", dtype, enabled=on))
            yield


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self.record_stack_traces = True
        self.proxy_buffer_attributes = True
        self._outside, self._thread = Modes.now(), threading.get_ident()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node, modes = super().create_node(*args, **kwargs), Modes.now()
        if modes != self._outside and node.op.startswith("call_"):
            node.meta["modes"] = modes, self._outside
        return node

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        if backward_hooks(m) and not self.is_leaf_module(m, self.path_of_module(m)):
            raise UsageError(
                f"{self.path_of_module(m)} has a backward hook, but consists of operations that may run on different "
                "workers: put the hook on a module of torch.nn, or on a tensor."
            )
        result = super().call_module(m, forward, args, kwargs)
        if isinstance(result, fx.Proxy):
            result.node.meta.setdefault("output_of", []).append(self.path_of_module(m))
        return result


@contextmanager
def _functions_kept(tracer: fx.Tracer) -> Iterator[None]:
    """Records each custom autograd function as one operation: the operations of its forward pass have another gradient."""
    kept: Any = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(one, fx.Proxy) for one in tree_leaves((args, kwargs))):
            return kept.__func__(cls, *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return cls.apply(*args, **kwargs)

        call.__name__ = call.__qualname__ = cls.__name__
        return tracer.create_proxy("call_function", call, args, kwargs)

    function: Any = torch.autograd.Function
    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = kept


class GraphRunner(fx.Interpreter):
    """Runs operations of a graph, each in the modes in which the model runs it."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, garbage_collect_values=False, graph=graph)

    def run_node(self, n: fx.Node) -> Any:
        if "modes" not in n.meta:
            return super().run_node(n)
        modes, outside = n.meta["modes"]
        with modes.entered(outside):
            value = super().run_node(n)
        return value if modes.with_gradient else _without_gradient(value)


def _without_gradient(value: Any) -> Any:
    """Views of parameters that were made without gradients claim to need one, and backward passes from them fail."""
    if type(value) in (tuple, list):
        return type(value)(map(_without_gradient, value))
    claims = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and value.is_leaf
    return value.detach() if claims else value


def arguments_of(model: nn.Module, example: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """As `bound`, for an example: a tensor, a tuple, or named arguments."""
    if isinstance(example, Mapping):
        return bound(model, (), example)
    return bound(model, example if isinstance(example, tuple | list) else (example,), {})


def bound(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments of the model's `forward` by name, and the names of those that vary: None is a constant.

    Raises:
        UsageError: `forward` has other arguments.
    """
    signature = inspect.signature(model.forward)
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise UsageError(
            f"The example does not fit {type(model).__name__}.forward{signature}: {first_line(error)}."
        ) from None
    if any(signature.parameters[one].kind in (2, 4) for one in arguments):
        raise UsageError(
            f"{type(model).__name__}.forward takes *args or **kwargs, whose number a graph cannot know: name its "
            "arguments."
        )
    defaults = _defaults(signature)
    return arguments, tuple(k for k, v in arguments.items() if v is not None or defaults[k] is not None)


def _defaults(signature: inspect.Signature) -> dict[str, Any]:
    """The defaults of named arguments; None for those that have none."""
    named = {k: v for k, v in signature.parameters.items() if v.kind not in (2, 4)}
    return {k: None if v.default is v.empty else v.default for k, v in named.items()}


@contextmanager
def in_training_mode(model: nn.Module) -> Iterator[None]:
    """A model in training mode, unless it already is; afterwards, each of its modules is in its own mode again."""
    modes = [(one, one.training) for one in model.modules()]
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for one, training in modes:
            one.training = training


def trace_graph(model: nn.Module, given: Container[str]) -> fx.Graph:
    """The model's graph, in its current mode; its leaves are torch's own modules, and arguments not `given` are constants.

    Raises:
        UsageError: the model's control flow depends on computed values, with its line; or `forward` changes attributes, except
            for caches that its first call fills.
    """
    constants = {k: v for k, v in _defaults(inspect.signature(model.forward)).items() if k not in given}
    names: list[str] = []
    for _ in range(2):
        before = values_of(model)
        graph = _traced_once(model, constants)
        if not (names := changed(before, values_of(model))):
            return graph
    raise UsageError(
        f"forward of {type(model).__name__} changes {names[0]}, which a graph of tensor operations cannot do: return "
        "tensors, count in the loop, and keep what changes in a buffer."
    )


def _traced_once(model: nn.Module, constants: Mapping[str, Any]) -> fx.Graph:
    for name in [one for one in vars(model) if one.startswith("_tensor_constant")]:
        delattr(model, name)  # from an earlier trace: a new graph numbers its names from 0
    state = torch_state()
    try:
        with _tracing, torch.enable_grad(), _functions_kept(tracer := _Tracer()):
            graph = tracer.trace(model, concrete_args=dict(constants) or None)
    except UsageError:
        raise
    except RecursionError as error:
        raise UsageError(f"{type(model).__name__} has no graph: its forward calls itself endlessly.") from error
    except Exception as error:  # user code may raise anything on proxy values
        line = _users_line(traceback.extract_tb(error.__traceback__))
        raise UsageError(
            f"{type(model).__name__} has no graph: at {line} its code depends on a tensor's value or kind "
            f"({first_line(error)}{about_none(constants, error)}); move that code out of forward, or into a function marked "
            "with torch.fx.wrap."
        ) from error
    if not torch.equal(state, torch_state()):
        torch.set_rng_state(state)
        raise UsageError(
            f"{type(model).__name__} draws random numbers that depend on no input, so its graph would draw the same "
            "ones in every step: draw them from a tensor's shape, as torch.randn_like does."
        )
    for node in list(graph.nodes):  # asserts are the checks that torch.fx adds for unchanged defaults
        if node.op == "call_function" and is_assert(node.target):
            graph.erase_node(node)
        elif node.target in (torch.autograd.grad, torch.autograd.backward, "backward"):
            raise UsageError(
                f"forward of {type(model).__name__} computes gradients ({line_of(node)}) of operations that may run on "
                "several workers: move that code into a function marked with torch.fx.wrap."
            )
    _follow_changes(graph, model)
    graph.eliminate_dead_code(_has_effect)
    return graph


def about_none(arguments: Mapping[str, Any], error: Exception) -> str:
    """A clause that names arguments with None in them, if the error is about None."""
    none = ", ".join(name for name, value in arguments.items() if any(one is None for one in tree_leaves(value)))
    clause = f", with None among the inputs ({none}): give a tensor, or make None an argument that forward tests"
    return clause if none and "None" in str(error) else ""


def replace_constants(graph: fx.Graph, constants: Mapping[str, Any]) -> None:
    """Replaces operations whose values follow from shapes by these values."""
    for node in graph.nodes:
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda one: constants.get(one.name, one))
    for node in [one for one in graph.nodes if one.name in constants]:
        graph.erase_node(node)


def digest(graph: fx.Graph, constants: Container[str]) -> str:
    """A digest of a graph's operations and their connections, and of numbers that decide shapes, but of no other numbers."""
    lines = [text_of(node, with_numbers=node.name in constants) for node in graph.nodes]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def text_of(node: fx.Node, *, with_numbers: bool = True) -> str:
    """An operation and its arguments."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    given = node.args, dict(node.kwargs), node.meta.get("modes", ())[:1]
    return f"{node.op} {node.name} {target} {given if with_numbers else map_aggregate(given, _masked)}"


def _masked(value: Any) -> Any:
    return "#" if isinstance(value, int | float) and not isinstance(value, bool) else value


def _users_line(frames: traceback.StackSummary) -> str:
    own = [f for f in frames if _TORCH not in Path(f.filename).parents and _OURS not in Path(f.filename).parents]
    return f"line {own[-1].lineno} of {own[-1].filename}" if own else "a place that torch.fx does not name"


def line_of(node: fx.Node) -> str:
    """A node's place in the user's code."""
    lines = [one for one in (node.stack_trace or "").splitlines() if one.strip().startswith("File ")]
    for one in reversed(lines):
        file, _, rest = one.strip()[len('File "') :].partition('", line ')
        if _TORCH not in Path(file).parents and _OURS not in Path(file).parents:
            return f"{Path(file).name}:{rest.split(',')[0]}"
    return ""


def _follow_changes(graph: fx.Graph, model: nn.Module) -> None:
    """Makes readers of a tensor that come after an in-place operation read that operation's result instead."""
    at = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if changes_in_place(node, model):
            node.args[0].replace_all_uses_with(node, lambda user, end=at[node]: at[user] > end)


def changes_in_place(node: fx.Node, model: nn.Module) -> bool:
    """Whether an operation changes its first argument."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    changes = node.op != "call_module" and name.endswith("_") and not name.endswith("__")
    changes |= node.kwargs.get("inplace") is True
    changes |= node.op == "call_module" and getattr(model.get_submodule(str(node.target)), "inplace", False) is True
    return changes and bool(node.args) and isinstance(node.args[0], fx.Node)


def _has_effect(node: fx.Node) -> bool:
    """Whether torch.fx must keep a node without readers: calls that may change a tensor in place."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", "")).endswith("_") or node.target in (operator.setitem,)
    return node.op == "call_module" or (node.op == "call_method" and str(node.target).endswith("_"))
