"""Compares one training step of a plan's parts with the model's own, on the example and with the same random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from paceline.errors import UsageError
from paceline.model_parallel.graph.capture import in_training_mode, line_of
from paceline.model_parallel.graph.execute import PlacedPart
from paceline.model_parallel.graph.in_threads import run_parts
from paceline.model_parallel.graph.micro_batches import (
    are_close,
    gradients_are_close,
    micro_batch,
    rounding,
    weighted_sum,
)
from paceline.model_parallel.graph.place import Placement
from paceline.model_parallel.graph.plan_data import PlanData
from paceline.model_parallel.graph.problem import Device, Group, Problem
from paceline.model_parallel.graph.trace import Traced, tensors_in
from paceline.system.torch_random import torch_undisturbed

_GRADIENT = "the gradient of "  # a parameter's name follows


def verify(plan: PlanData, model: nn.Module, traced: Traced, batch: Mapping[str, Any]) -> bool:
    """Whether outputs, gradients and buffers are the model's; False: they differ between two equal steps of the model itself.

    The graph is compared with the model while both draw their random numbers in its order, and the parts with the graph while
    each operation has its own.

    Costs: up to four copies of the model, and five steps.

    Raises:
        UsageError: they differ by more than rounding; the message names the first operation that does.
    """
    number, share = plan.problem.microbatches, rounding(traced)
    with in_training_mode(model), torch_undisturbed(), torch.enable_grad():  # and so its copies
        first = micro_batch(batch, plan.cut, 0, number) if number > 1 else dict(batch)
        alone = _on_one(plan, traced, 1)
        own, graph = _of_step(model, first), _of_step(model, first, alone)
        if not _agree(own, graph, share):
            if not _agree(own, _of_step(model, first), share):
                return False
            raise UsageError(
                f"The graph of {plan.model} computes a different result than its forward, first at "
                f"{_first_in_graph(alone, model, first)}: move code that depends on more than values of "
                "tensors out of forward, or into a function marked with torch.fx.wrap."
            )
        if plan.workers > 1 or number > 1:
            _compare_parts(replace(plan, wire=""), _on_one(plan, traced, number), model, batch, share)
    return True


def _compare_parts(plan: PlanData, alone: PlanData, model: nn.Module, batch: Mapping[str, Any], share: float) -> None:
    whole, cut = copy.deepcopy(model), copy.deepcopy(model)
    [one] = _run(alone, whole, batch)
    for part in (parts := _run(plan, cut, batch)):
        if not _agree(_results(whole, one.out), _results(cut, part.out), share):
            raise UsageError(
                f"The parts of {plan.model} compute a different result than the whole, first at {_first(one, parts, share)}: "
                "this is an error of Paceline; pin that operation to the worker of its neighbours, and report it."
            )


def _on_one(plan: PlanData, traced: Traced, microbatches: int) -> PlanData:
    """All of a plan's operations on one device, in the model's order."""
    placed, groups = plan.device_of, plan.problem.groups
    nodes = tuple(one.name for one in traced.nodes if one.name in placed)
    whole = Group("all", nodes, state=tuple({name for one in groups for name in one.state}))
    problem = Problem((whole,), (), (Device(),), microbatches=microbatches)
    cut = plan.cut if microbatches > 1 else ()
    return replace(plan, problem=problem, placement=Placement("", (0,), (0,), 0.0), cut=cut)


class _Watched(PlacedPart):
    """A part that knows which operation runs, and keeps a step's values of its operations and their gradients.

    If `in_turn`, operations draw their random numbers one after the other, as those of the model do, and nothing is kept.
    """

    def __init__(self, plan: PlanData, model: nn.Module, worker: int, *, in_turn: bool = False) -> None:
        super().__init__(plan, model, worker)
        self.out: Any = None
        self.running = ""
        self.values: dict[tuple[str, int, int], torch.Tensor] = {}
        self.gradients: dict[tuple[str, int, int], torch.Tensor] = {}
        self._own = () if in_turn else {name for name, device in plan.device_of.items() if device == worker}
        if in_turn:
            self._seeds = {}

    def _run(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        for one in node.all_input_nodes:
            self._value(one, env)
        self.running = node.name
        super()._run(node, env)

    def _keep(self, node: fx.Node, value: Any, env: dict[fx.Node, Any]) -> None:
        super()._keep(node, value, env)
        if node.name in self._own:
            for at, one in enumerate(tensors_in(value)):
                key = node.name, self.calls, at
                self.values[key] = one.detach().clone()
                if one.requires_grad:
                    one.register_hook(partial(self.gradients.__setitem__, key))

    def place_of(self, name: str) -> str:
        return f"{name} ({line_of(self._nodes[name])})"


def _run(plan: PlanData, model: nn.Module, batch: Mapping[str, Any]) -> list[_Watched]:
    def step(part: Any) -> Any:
        part.out = _step(part, batch)
        return part

    return run_parts(plan, [model] * plan.workers, step, _Watched)


def _first(one: _Watched, parts: list[_Watched], share: float) -> str:
    """The first operation in a step's order whose value, or else whose gradient, differs."""
    values = {key: value for part in parts for key, value in part.values.items()}
    gradients = {key: value for part in parts for key, value in part.gradients.items()}
    for key, value in one.values.items():
        if not are_close(value, values[key], share):
            return one.place_of(key[0])
    for key in reversed(one.values):
        expected, found = one.gradients.get(key), gradients.get(key)
        if (expected is None) != (found is None) or (found is not None and not are_close(expected, found, share)):
            return f"the gradient of {one.place_of(key[0])}"
    return "a parameter's gradient"


def _step(called: nn.Module, batch: Mapping[str, Any]) -> Any:
    out = called(**batch)
    loss = weighted_sum(out)
    if loss is not None:
        loss.backward()
    return out


def _of_step(model: nn.Module, batch: Mapping[str, Any], plan: PlanData | None = None) -> dict[str, torch.Tensor]:
    twin = copy.deepcopy(model)
    called = twin if plan is None else _Watched(plan, twin, 0, in_turn=True)
    torch.manual_seed(0)
    return _results(twin, _step(called, batch))


class _Calls(TorchFunctionMode):
    """Lists calls of PyTorch's functions: name, how inputs are differentiated, outputs; and which operation made it."""

    def __init__(self, running: Callable[[], str] = str) -> None:
        super().__init__()
        self.running = running
        self.found: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tuple(type(one.grad_fn).__name__ for one in tensors_in(args))
        out = func(*args, **kwargs or {})
        made = [
            (tuple(one.shape), repr(one.detach().double().sum().item()), type(one.grad_fn).__name__)
            for one in tensors_in(out)
        ]
        if made:
            self.found.append((self.running(), (getattr(func, "__name__", ""), given, *made)))
        return out


def _first_in_graph(plan: PlanData, model: nn.Module, batch: Mapping[str, Any]) -> str:
    """The first operation of the graph that the model does not call alike."""
    twin, again = copy.deepcopy(model), copy.deepcopy(model)
    part = _Watched(plan, again, 0, in_turn=True)
    torch.manual_seed(0)
    with _Calls() as own:
        _step(twin, batch)
    torch.manual_seed(0)
    with _Calls(lambda: part.running) as graph:
        _step(part, batch)
    left = iter([one for _, one in own.found])
    for name, one in graph.found:
        if name and one not in left:  # reads on until it finds it
            return part.place_of(name)
    return "the backward pass"


def _results(model: nn.Module, out: Any) -> dict[str, torch.Tensor]:
    """By name, all that a step leaves."""
    found = {f"output {at}": one.detach() for at, one in enumerate(tensors_in(out))}
    found |= {f"{_GRADIENT}{name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
    return found | {f"buffer {name}": one for name, one in model.named_buffers()}


def _agree(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], share: float) -> bool:
    if own.keys() != other.keys():
        return False
    trained = [name for name in own if name.startswith(_GRADIENT)]
    others = (name for name in own if not name.startswith(_GRADIENT))
    return all(are_close(own[name], other[name], share) for name in others) and gradients_are_close(
        [own[name] for name in trained], [other[name] for name in trained], share
    )
