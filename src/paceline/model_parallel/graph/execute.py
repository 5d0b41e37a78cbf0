"""One worker's part of a placed model: its operations in the plan's order, with sends and receives inside autograd.

The forward pass follows the plan's global order. Autograd runs its operations backwards, latest first, and so follows the
reversed order: a tensor that was sent waits for its gradient there, and a received one sends it. Every wait is therefore
for something earlier in an order that all workers share, which prevents deadlocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import UsageError
from paceline.membership.environment import current_environment
from paceline.model_parallel.graph.attributes import changed, values_of
from paceline.model_parallel.graph.capture import (
    GraphRunner,
    bound,
    digest,
    in_training_mode,
    replace_constants,
    trace_graph,
)
from paceline.model_parallel.graph.exchange import Exchange
from paceline.model_parallel.graph.fetch import find_values, needed_for, run_needed
from paceline.model_parallel.graph.gradients import (
    LOSS,
    Anchor,
    Give,
    InOrder,
    Take,
    Tokens,
    added_in_another_order,
    pass_none_on,
    whole_passes,
)
from paceline.model_parallel.graph.micro_batches import joined, mapped, micro_batch
from paceline.model_parallel.graph.partition import MOST_READERS, Operation, programs
from paceline.model_parallel.graph.plan_data import PlanData
from paceline.model_parallel.graph.problem import TensorInfo
from paceline.model_parallel.graph.trace import tensors_in
from paceline.system.torch_random import torch_undisturbed

_ONES = 2**63 - 1
_generator = threading.Lock()  # parts in threads of one process share PyTorch's generator


def node_seed(seed: int, call: int, index: int) -> int:
    """The plan's seed for the `index`-th operation that draws random numbers, in one call; independent of the placement."""
    mixed = (seed * 0x9E3779B97F4A7C15 + call * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB + 1) & (2**64 - 1)
    mixed ^= mixed >> 31
    return (mixed * 0xD6E8FEB86659FD93) & _ONES


class PlacedPart(nn.Module):
    """One worker's part of a placed model. Call it like the model, with the same inputs on every worker.

    Every worker gets the model's output and computes the loss; gradients flow from the loss of the worker that has produced
    the output. Each worker sees, and trains, only the parameters of its operations.

    Args:
        model: the whole model, built in the same way on every worker.
        worker: whose part; None: this worker's.

    Attributes:
        worker: whose part this is.
        calls: number of forward passes so far, including micro-batches.
        owner_of: by name of each parameter and buffer of the model, the worker whose part has it.
    """

    worker_kind = "paceline.model_parallel.graph.placed_worker:PlacedWorker"

    def __init__(self, plan: PlanData, model: nn.Module, worker: int | None = None) -> None:
        super().__init__()
        environment = current_environment()
        if worker is None:
            alone = 0 if plan.workers == 1 else None
            worker = environment.worker_id % plan.workers if environment is not None else alone
        if worker is None:
            raise UsageError(
                f"This plan is for {plan.workers} workers: call plan.part in the function that paceline.launch runs, "
                "with plan=plan, or in a script under torchrun or paceline launch, or name the worker with worker=."
            )
        plan.check_worker(worker)
        self.plan, self.worker, self.calls, self._replica = plan, worker, 0, 0
        self._whole = (model,)  # a tuple, so that it is not a submodule whose parameters belong to the part
        self._follow(graph_of(plan, model))
        self._program = programs(plan.problem, plan.placement.device_of, plan.placement.order)[worker]
        self._transfers = {one: at for at, one in enumerate(plan.transfers())}
        self._seeds = {name: at for at, name in enumerate(plan.random)}
        self._added = added_in_another_order(plan, worker)
        self._read_as: dict[tuple[str, fx.Node], torch.Tensor] = {}  # values that replace those of `env` for one reader
        self._exchange: Exchange | None = None
        self.joined: Any = None  # the `JoinedRun` in which this is the worker's part
        self.owner_of = _owners(plan, model)
        self.training = model.training
        if not any(self.owner_of[name] == self.worker and one.requires_grad for name, one in model.named_parameters()):
            dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
            self.nothing = nn.Parameter(torch.zeros((), dtype=dtype))  # optimizers and workers need one to train

    @property
    def whole(self) -> nn.Module:
        return self._whole[0]

    def _follow(self, graph: fx.Graph) -> None:
        """Runs this graph from now on, in which values that follow from shapes are still operations."""
        replace_constants(graph, dict(self.plan.constants))
        self._graph, self._attributes = graph, values_of(self.whole)
        self._nodes = {node.name: node for node in graph.nodes}
        self._runner = GraphRunner(self.whole, graph)
        self._output = next(node for node in graph.nodes if node.op == "output")

    def _follow_changed(self, names: list[str]) -> None:
        """Traces the model again, since the loop has changed an attribute, such as an annealed factor."""
        graph = trace_graph(self.whole, self.plan.arguments)
        if digest(graph, dict(self.plan.constants)) != self.plan.digest:
            raise UsageError(
                f"{names[0]} has changed since the model was placed, and changes the operations that forward runs or their "
                "shapes, while a plan has only those of its example: keep it as it is, or place the model again."
            )
        self._follow(graph)

    def connect(self, exchange: Exchange, calls: int = 0, replica: int = 0) -> None:
        """Connects it to the other parts, after `calls` earlier forward passes of the run; called by `attach`.

        `replica`: of the model, if there are several; each draws its own random numbers.
        """
        self._exchange, self.calls, self._replica = exchange, calls, replica

    @property
    def transfers(self) -> tuple[tuple[str, str, int, int], ...]:
        """Messages that this worker has sent since the last step began: "move" or "return", operation, from, to."""
        return tuple(self._exchange.sent) if self._exchange is not None else ()

    # As a module

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        yield from (pair for pair in self.whole.named_parameters(prefix, recurse) if self._is_own(pair[0], prefix))
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        yield from (pair for pair in self.whole.named_buffers(prefix, recurse) if self._is_own(pair[0], prefix))

    def _is_own(self, name: str, prefix: str) -> bool:
        return self.owner_of.get(name.removeprefix(f"{prefix}." if prefix else "")) == self.worker

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The part's own parameters and buffers; the whole model's are in `whole.state_dict()` once the run has ended."""
        return {name: one.detach() for name, one in (*self.named_parameters(), *self.named_buffers())}

    def train(self, mode: bool = True) -> PlacedPart:
        self.training = mode
        self.whole.train(mode)
        return self

    # One call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, on every worker.

        Raises:
            UsageError: the inputs' shapes differ from the example's, or the workers are not connected.
            WorkerLostError: another worker has left, or sends nothing within the deadline.
        """
        exchange, arguments = self._prepared(args, kwargs)
        exchange.begin_forward()
        recorder = exchange.recorder
        if recorder is not None:
            recorder.begin_step(trains=torch.is_grad_enabled())
        number = self.plan.problem.microbatches
        outs: list[Any] = []
        tokens: list[torch.Tensor] = [torch.zeros((), requires_grad=True)] if torch.is_grad_enabled() else []
        for m in range(number):
            part = arguments if number == 1 else micro_batch(arguments, self.plan.cut, m, number)
            if recorder is not None:
                recorder.microbatch = m
            outs.append(self._pass(part, tokens))
            self.calls += 1
        out = outs[0] if number == 1 else joined(outs)
        out = self._anchored(out, tokens) if tokens else out
        exchange.end_forward()
        return out

    @torch.no_grad()
    def fetch(self, names: str | Sequence[str], *args: Any, **kwargs: Any) -> Any:
        """Values inside the model, such as a tower's output, without the operations that they do not need.

        Each operation runs on its own worker, and all workers get the values. All call it together, between two steps, with
        the same names and inputs. There are no gradients.

        Costs: the operations that the values need, their transfers, and sending the values to all workers.

        Args:
            names: of modules, by their paths, for their outputs in their last call; or of operations in the graph. One name,
                or several.
            *args: the model's inputs.
            **kwargs: likewise, by name.

        Returns:
            the value of one name, or a list of values: copies, equal to those in the model's own forward pass.

        Raises:
            UsageError: the graph has no such value, it is not one tensor, or the plan has micro-batches.
            WorkerLostError: as for a call of the model.
        """
        if self.plan.problem.microbatches > 1:
            raise UsageError("fetch needs a plan without micro-batches: place the model for latency.")
        exchange, arguments = self._prepared(args, kwargs)
        fetched = find_values(self._graph, [names] if isinstance(names, str) else names)
        needed = needed_for(fetched, self._graph, self.plan, self.whole)
        env = self._inputs(arguments)
        exchange.begin_forward()
        values = run_needed(needed, fetched, self.plan, self.worker, exchange, self._value, env)
        exchange.end_forward()
        return values[0] if isinstance(names, str) else values

    def _prepared(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Exchange, dict[str, Any]]:
        """The messages with the others, and the arguments by name."""
        if not (self.training or self.plan.any_mode):
            raise UsageError(
                f"{self.plan.model} computes a different result in evaluation mode than in training mode, in which it was "
                "placed: evaluate with the whole model, as attach(..., evaluate=...) does."
            )
        if self._transfers and torch.is_autocast_enabled("cpu"):
            raise UsageError(
                "Under torch.autocast a placed model would make tensors of different dtypes than its plan sends: leave "
                'autocast out; pl.place(..., wire="bfloat16") halves the traffic.'
            )
        need_gradients = torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in((args, kwargs)))
        if need_gradients and self.plan.workers > 1:
            raise UsageError(
                "Inputs of a placed model get no gradient, as each worker would compute only its own part's: detach them "
                "(x.detach())."
            )
        if self._exchange is None:
            if self._transfers:
                raise UsageError("This part needs the others: call it inside `with paceline.attach(part, optimizer)`.")
            self._exchange = Exchange.alone()
        arguments = self._checked(args, kwargs)
        if names := changed(self._attributes, values_of(self.whole)):
            self._follow_changed(names)
        return self._exchange, arguments

    def _checked(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        arguments, given = bound(self.whole, args, kwargs)
        number = self.plan.problem.microbatches
        shapes = tuple((tuple(one.shape), str(one.dtype)) for value in arguments.values() for one in tensors_in(value))
        cut = self.plan.cut or [False] * len(self.plan.inputs)
        rows = zip(self.plan.inputs, cut, strict=True)
        expected = tuple(((s[0] * number, *s[1:]) if is_cut else s, d) for (s, d), is_cut in rows)
        if shapes != expected or given != self.plan.arguments:
            raise UsageError(
                f"The plan expects the shapes of its example's inputs, {_shapes(expected)}, but was given "
                f"{_shapes(shapes)}: use batches of one size (drop_last=True), or place the model with another "
                "example."
            )
        return arguments

    def _pass(self, arguments: dict[str, Any], tokens: list[torch.Tensor]) -> Any:
        env = self._inputs(arguments)
        for one in self._program:
            self._do(one, env, tokens)
        return fx.map_arg(self._output.args[0], lambda node: self._read_as.get((LOSS, node), self._value(node, env)))

    def _inputs(self, arguments: dict[str, Any]) -> dict[fx.Node, Any]:
        self._read_as.clear()
        return {node: arguments.get(str(node.target)) for node in self._graph.nodes if node.op == "placeholder"}

    def _do(self, one: Operation, env: dict[fx.Node, Any], tokens: list[torch.Tensor]) -> None:
        exchange = self._exchange
        assert exchange is not None
        if one.kind == "run":
            group, begun_s = self.plan.problem.groups[one.group], time.perf_counter()
            for name in group.nodes:
                self._run(self._nodes[name], env)
            if exchange.recorder is not None and tokens:
                exchange.recorder.ran(group.name, begun_s, [env[self._nodes[name]] for name in group.nodes])
            return
        transfer = one.transfer
        assert transfer is not None
        tensor = self.plan.problem.tensors[transfer.tensor]
        node, number = self._nodes[tensor.node], self.calls * len(self._transfers) + self._transfers[transfer]
        returned = number * MOST_READERS + one.reader
        if one.kind == "send":
            _check_shape(env[node], tensor)
            exchange.send(transfer.to, "move", number, env[node].detach(), tensor)
        elif one.kind == "receive":
            env[node] = exchange.receive(transfer.source, "move", number, tensor)
        elif tokens and one.kind == "take" and env[node].requires_grad:
            value = self._read_as.pop((one.node, node), env[node])
            tokens.append(Take.apply(value, exchange, transfer, tensor, returned))
        elif tokens and one.kind == "give":
            value, token = Give.apply(tokens[0], env[node], exchange, transfer, tensor, returned)
            tokens.append(token)
            if one.node:
                self._read_as[one.node, node] = value
            else:
                self._keep(node, value, env)

    def _keep(self, node: fx.Node, value: Any, env: dict[fx.Node, Any]) -> None:
        """If the plan's order differs from the model's, gives each reader a node that sums gradients in the model's order."""
        env[node] = value
        readers = self._added.get(node.name, ())
        if readers and value.requires_grad:
            for reader, own in zip(readers, InOrder.apply(value, len(readers)), strict=True):
                self._read_as[reader, node] = own

    def _run(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        for one in node.all_input_nodes:
            self._value(one, env)
        own = {
            one: self._read_as.pop((node.name, one))
            for one in node.all_input_nodes
            if (node.name, one) in self._read_as
        }
        read = self._runner.env = env | own if own else env
        before = [tensor.grad_fn for one in node.all_input_nodes for tensor in tensors_in(read[one])]
        with self._drawing(node.name):
            value = self._runner.run_node(node)
        pass_none_on(tensors_in(value), before)
        self._keep(node, value, env)

    @contextmanager
    def _drawing(self, name: str) -> Iterator[None]:
        """Seeds PyTorch's generator for an operation that draws random numbers."""
        if name not in self._seeds:
            yield
            return
        with _generator, torch_undisturbed():
            torch.manual_seed(node_seed(self.plan.seed + self._replica, self.calls, self._seeds[name]))
            yield

    def _value(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """The value of an operation that has run here, a parameter, or a view of the inputs, which every worker makes."""
        if node not in env:
            self._run(node, env)
        return env[node]

    def _anchored(self, out: Any, tokens: list[torch.Tensor]) -> Any:
        """The output, connected so that a backward pass from it reaches all sends and receives of this worker."""
        token, leaf = Tokens.apply(self._exchange, *tokens), torch.zeros((), requires_grad=True)
        check = whole_passes(leaf)
        for one in (token, *tensors_in(out)):
            if len(tokens) > 1 and one.grad_fn is not None:
                one.register_hook(check)
        return mapped(out, lambda one: Anchor.apply(one, token, leaf) if one.is_floating_point() else one)


def _owners(plan: PlanData, model: nn.Module) -> dict[str, int]:
    """By name of each parameter and buffer, the worker whose part has it; unused ones belong to worker 0."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    pairs = zip(plan.problem.groups, plan.placement.device_of, strict=True)
    return dict.fromkeys(names, 0) | {name: worker for group, worker in pairs for name in group.state}


def graph_of(plan: PlanData, model: nn.Module) -> fx.Graph:
    """The model's graph; refuses another model than the plan's."""
    with in_training_mode(model):
        graph = trace_graph(model, plan.arguments)
    if digest(graph, dict(plan.constants)) != plan.digest:
        raise UsageError(
            f"The plan belongs to another model ({plan.model}) than this {type(model).__name__}: place this one, or "
            "build it as it was built when it was placed."
        )
    return graph


def _check_shape(value: torch.Tensor, tensor: TensorInfo) -> None:
    if tuple(value.shape) != tensor.shape or str(value.dtype) != f"torch.{tensor.dtype}":
        raise UsageError(
            f"The value of {tensor.node} is now {_shapes([(tuple(value.shape), str(value.dtype))])}, and its plan sends "
            f"{_shapes([(tensor.shape, tensor.dtype)])}: place the model with an example that has these shapes."
        )


def _shapes(shapes: Sequence[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{list(shape)} of {dtype.removeprefix('torch.')}" for shape, dtype in shapes) or "nothing"
