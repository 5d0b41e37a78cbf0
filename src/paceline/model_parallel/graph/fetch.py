"""Partial execution of a placed model, as TensorFlow's fetch: only the operations that some of its values need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import UsageError, shown
from paceline.model_parallel.graph.capture import changes_in_place
from paceline.model_parallel.graph.exchange import Exchange, described
from paceline.model_parallel.graph.plan_data import PlanData
from paceline.specs.text import closest

_MOST_DIMS = 16
_DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128"),
)


def find_values(graph: fx.Graph, names: Iterable[str]) -> list[fx.Node]:
    """The operations whose values the names mean: an operation's own, or a module's output in its last call.

    Raises:
        UsageError: the graph has none of that name.
    """
    known = {node.name: node for node in graph.nodes if node.op.startswith("call_")}
    known |= {path: node for node in graph.nodes for path in node.meta.get("output_of", ())}
    for name in names:
        if name not in known:
            listed = sorted(known, key=lambda one: one.count("."))[:12]
            raise UsageError(
                f"The model's graph has no operation, and no module with one tensor as its output, named {shown(name)}."
                f"{closest(name, known)} It has {', '.join(listed)}{', ...' if len(known) > 12 else ''}."
            )
    return [known[name] for name in names]


def needed_for(fetched: Sequence[fx.Node], graph: fx.Graph, plan: PlanData, model: nn.Module) -> list[fx.Node]:
    """The operations that compute these values, in the model's order, and those that change in place what they read."""
    at = {node: index for index, node in enumerate(graph.nodes)}
    group_of = {name: group for group, one in enumerate(plan.problem.groups) for name in one.nodes}
    changes = [node for node in graph.nodes if changes_in_place(node, model)]
    needed: set[fx.Node] = set()
    pending = list(fetched)
    while pending:
        if (node := pending.pop()) not in needed:
            needed.add(node)
            pending += node.all_input_nodes
        if not pending:
            pairs = [(reader, read) for reader in needed for read in reader.all_input_nodes]
            unmet = [one for one in changes if one not in needed]
            pending += [one for one in unmet if any(_may_see(one, *pair, at, group_of) for pair in pairs)]
    return sorted(needed, key=lambda one: at[one])


def _may_see(change: fx.Node, reader: fx.Node, read: fx.Node, at: dict[fx.Node, int], group_of: dict[str, int]) -> bool:
    """Whether an operation that does not depend on a change may read the memory that it has changed.

    Operations that share memory which one of them changes are in one group; a module reads its parameters by itself.
    """
    changed: Any = change.args[0]
    if changed.op == "get_attr":
        is_its_own = reader.op == "call_module" and str(changed.target).startswith(f"{reader.target}.")
        return is_its_own and at[change] < at[reader]
    is_between = at[read] < at[change] < at[reader]
    return is_between and read.name in group_of and group_of[read.name] == group_of.get(change.name)


def run_needed(
    needed: Sequence[fx.Node],  # from `needed_for`
    fetched: Sequence[fx.Node],  # operations among them
    plan: PlanData,  # the placement
    worker: int,  # this one
    exchange: Exchange,  # with the others
    # An operation's value, whose inputs are in the values so far.
    compute: Callable[[fx.Node, dict[fx.Node, Any]], Any],
    env: dict[fx.Node, Any],  # the values so far: the model's inputs
) -> list[torch.Tensor]:
    """The fetched values. Each operation runs on its own worker, tensors go to the workers that read them, results to all.

    All workers follow the model's order, so that none waits for a later operation.

    Raises:
        UsageError: a fetched value is not a tensor.
    """
    device_of, tensor_of = plan.device_of, {one.node: one for one in plan.problem.tensors}
    placed = [one for one in needed if one.name in device_of]
    coming: dict[fx.Node, int] = {}
    results: dict[fx.Node, Any] = {}
    for node in placed:
        owner = device_of[node.name]
        readers = {device_of[one.name] for one in node.users if one in placed} - {owner}
        number = exchange.number_fetched()
        if worker in readers:
            coming[node] = number
        if owner != worker:
            continue
        for one in node.all_input_nodes:
            if one in coming and one not in env:
                env[one] = exchange.receive(device_of[one.name], "fetch", coming[one], tensor_of[one.name])
        value = compute(node, env)
        if node in fetched:
            results[node] = value.clone() if isinstance(value, torch.Tensor) else value
        for to in sorted(readers):
            exchange.send(to, "fetch", number, value, tensor_of[node.name])
    for node in fetched:
        if node.name not in device_of:  # a view of the inputs
            results[node] = compute(node, env).clone()
        else:
            _share(exchange, node, device_of[node.name], worker, plan.workers, results)
    return [results[node] for node in fetched]


def _share(
    exchange: Exchange, node: fx.Node, owner: int, worker: int, workers: int, results: dict[fx.Node, Any]
) -> None:
    """Sends a value from its owner to all others, after its type and shape, which these do not know."""
    number = exchange.number_fetched()
    header = _header(results[node]) if owner == worker else torch.empty(_MOST_DIMS, dtype=torch.int64)
    about = described(f"the shape of {node.name}", header)
    others = [one for one in range(workers) if one != owner]
    if owner == worker:
        for to in others:
            exchange.send(to, "fetched shape", number, header, about)
    else:
        header = exchange.receive(owner, "fetched shape", number, about)
    if header[0] < 0:
        raise UsageError(f"The value of {node.name} is not one tensor: fetch the operations that read it instead.")
    kind, *sizes = header[header >= 0].tolist()
    value = described(node.name, torch.empty(sizes, dtype=getattr(torch, _DTYPES[kind]), device="meta"))
    if owner == worker:
        for to in others:
            exchange.send(to, "fetched", number, results[node], value)
    else:
        results[node] = exchange.receive(owner, "fetched", number, value)


def _header(value: Any) -> torch.Tensor:
    """The number of a tensor's type and its shape, filled up with -1; only -1: it is no tensor."""
    row = (
        [_DTYPES.index(str(value.dtype).removeprefix("torch.")), *value.shape]
        if isinstance(value, torch.Tensor)
        else []
    )
    return torch.tensor([*row, *[-1] * (_MOST_DIMS - len(row))])
