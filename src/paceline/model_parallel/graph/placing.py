"""`place`: a model and an example become a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from paceline.errors import UsageError, shown
from paceline.membership.environment import SupervisedEnvironment, current_environment
from paceline.model_parallel.graph.capture import arguments_of, in_training_mode
from paceline.model_parallel.graph.coarsen import blocks_of, coarsened, find_nodes, merged, tensors_of
from paceline.model_parallel.graph.cost import LEAST_BLOCK_S, measure, spread
from paceline.model_parallel.graph.exchange import WIRES, wire_bytes
from paceline.model_parallel.graph.micro_batches import inputs_to_cut, micro_batch
from paceline.model_parallel.graph.place import Placement, check_placer
from paceline.model_parallel.graph.plan import Plan
from paceline.model_parallel.graph.problem import Device, Link, Problem, bounds, check_memory
from paceline.model_parallel.graph.trace import Traced, own_copy, trace
from paceline.model_parallel.graph.verify import verify
from paceline.simulator.hardware.core import COPY_VECTORS

_MOST_ERROR = 0.25
_TRIES = 3  # of measuring; other programs may spoil one
_MOST_DEVICES = 64


def place(
    model: nn.Module,
    example: Any,
    *,
    devices: int | Sequence[Device] = 2,
    objective: Literal["latency", "throughput"] = "latency",
    microbatches: int | None = None,
    slow: Mapping[int, float] | None = None,
    memory_bytes: int | None = None,
    pins: Mapping[str, int | str] | None = None,
    together: Sequence[tuple[str, str]] = (),
    link: Link | None = None,
    cluster: Any = None,
    placer: str | None = None,
    wire: str = "",
    seed: int = 0,
    repeats: int = 5,
    force: bool = False,
) -> Plan:
    """Decides which of several workers runs which part of a model, by measuring its parts and simulating placements.

    The model's forward pass is traced into a graph, and its forward and backward pass is measured in blocks, on one core while
    the others are busy. A long operation is a block; short ones share one with their neighbours, and the block's time is
    divided by floating-point operations. The graph is cut into groups that are worth a transfer between them. Several placers
    then propose placements, and the one with the shortest simulated step wins. Of up to 14 groups on 4 devices all placements
    are tried, and of up to 10 groups all orders; the plan says whether it is proven to be the best, or the best found.

    It helps a model with branches (towers, encoders, experts, critics), unequal devices, or a model too large for one device.
    A chain of layers, such as a plain transformer, gains nothing in a step's latency, and the plan says so; with `throughput`,
    several of its micro-batches are in flight.

    In a function that `launch(plan=...)` runs, it returns that run's plan and measures nothing. In a script, call it under
    `if __name__ == "__main__":`, because workers import the script.

    One step of the plan's parts is compared with the model's own, with the same random numbers: outputs, gradients, buffers.

    Costs: about `2 * repeats + 9` steps on one core, up to four copies of the model, and up to some seconds of planning.

    Args:
        model: on the CPU; it is copied and not changed.
        example: a batch, as `forward` takes it: a tensor, a tuple, or a mapping of named arguments; it is not changed.
            Batches must match it; an argument that is None is a constant.
        devices: number of workers, or a `Device` for each, with its slowness, memory and kind.
        objective: "latency" of one step, or "throughput" with several micro-batches in flight.
        microbatches: parts of a batch, for "throughput"; 8 by default. Their number must divide the batch, and the model must
            compute the same for each as within the batch: no batch norm, and no sum over samples.
        slow: by device, factor on its compute time.
        memory_bytes: of each device: parameters with gradients and optimizer state, and activations.
        pins: by a module's path or an operation's name, its device or kind of device.
        together: pairs of such names that must share a device.
        link: the cost of a transfer; None: between two processes of one machine.
        cluster: a `Cluster`, whose latency, bandwidth and slow links replace `link`: a device is a worker of the cluster.
        placer: use this one's placement: all-on-one, finish-soonest, earliest-first, critical-path, balanced, exact or
            best-found.
        wire: "bfloat16" sends float32 rounded to it; "bfloat16-truncated" cuts off, as published.
        seed: of the operations that draw random numbers, such as dropout.
        repeats: how often each block is measured.
        force: plan even if the blocks' times are more than 25 % off those of a whole step.

    Returns:
        The plan: `explain()` it, `save` it, give it to `launch`, and call `plan.part(model)` in its workers.

    Raises:
        UsageError: the model cannot be traced, changes its inputs, or gives other results for micro-batches; a pin, a
            constraint or the memory is impossible; the cost model is too inaccurate; the plan would not train the same model.

    Reference: Abadi et al., "TensorFlow: Large-Scale Machine Learning on Heterogeneous Distributed Systems", 2015,
        arXiv:1603.04467, section 3.2.
    """
    environment = current_environment()
    if isinstance(environment, SupervisedEnvironment) and isinstance(environment.plan, Plan):
        return environment.plan
    machines = _devices(devices, slow, memory_bytes)
    number = _microbatches(objective, microbatches)
    if wire not in WIRES:
        raise UsageError(f"wire must be one of {', '.join(one for one in WIRES if one)}, not {shown(wire)}.")
    check_placer(placer)
    link_factors: tuple[tuple[int, int, float], ...] = ()
    if cluster is not None and link is None:
        link = _link_of(cluster)
        link_factors = tuple(one for one in cluster.link_factors if max(one[:2]) < len(machines))
    example = own_copy(example)
    batch, given = arguments_of(model, example)
    traced, any_mode = _traced(model, example)
    arguments, cut = batch, ()
    if number > 1:
        cut = inputs_to_cut(model, traced, batch, number)
        arguments = micro_batch(batch, cut, 0, number)
        traced, any_mode = _traced(model, arguments)
    allowed_of, sets = _constraints(traced, machines, pins or {}, together)
    blocks, same_device = blocks_of(traced, allowed_of)
    busy_cores = len(machines) - 1
    rough = measure(model, traced, blocks, arguments, repeats=1, busy_cores=busy_cores).groups

    def problem_of(groups: Any, joined: Any) -> Problem:
        names = [one.nodes for one in groups]
        group_of = {name: at for at, own in enumerate(names) for name in own}
        tensors = tensors_of(
            traced, names, lambda one: wire_bytes(one.shape, one.dtype, "" if one.name in traced.outputs else wire)
        )
        asked = [(group_of[a], group_of[b]) for a, b in sets if a in group_of and b in group_of]
        classes = {tuple(sorted({*one})) for one in (*joined, *asked)}
        allowed = [next((allowed_of[name] for name in own if name in allowed_of), ()) for own in names]
        return Problem(
            groups=tuple(groups),
            tensors=tuple(tensors),
            devices=machines,
            link=link or Link(),
            allowed=tuple(allowed) if any(allowed) else (),
            together=tuple(sorted(one for one in classes if len(one) > 1)),
            microbatches=number,
            link_factors=link_factors,
        )

    singly = problem_of(rough, same_device)
    whole = coarsened(singly, [None] * len(rough), LEAST_BLOCK_S)
    parts = [one.nodes for one in merged(singly, whole)]
    measured = measure(model, traced, parts, arguments, repeats=repeats, busy_cores=busy_cores)
    tries = 1
    while measured.error > _MOST_ERROR and not force:
        if tries == _TRIES:
            raise UsageError(
                f"The model's parts, measured block by block {tries} times, add up to {measured.sum_s * 1000.0:.2f} "
                f"ms, but a whole step takes {measured.step_s * 1000.0:.2f} ms: {measured.error:.0%} off, too far to "
                "plan by. Use a larger batch, or plan anyway with --force (force=True)."
            )
        tries += 1
        measured = measure(model, traced, parts, arguments, repeats=repeats, busy_cores=busy_cores)
    fine = problem_of(spread(rough, whole, measured.groups), same_device)
    merging = coarsened(fine, [allowed_of.get(one.nodes[0]) for one in fine.groups])
    at = {one: index for index, members in enumerate(merging) for one in members}
    problem = problem_of(merged(fine, merging), [[at[one] for one in members] for members in fine.together])
    check_memory(problem)
    plan = Plan(
        model=type(model).__name__,
        digest=traced.digest,
        arguments=given,
        inputs=traced.inputs,
        cut=cut,
        outputs=traced.outputs,
        constants=tuple(traced.constants.items()),
        random=tuple(one.name for one in traced.nodes if one.is_random),
        any_mode=any_mode,
        problem=problem,
        placement=Placement("", (), (), 0.0),
        others=(),
        bounds=bounds(problem),
        step_s=measured.step_s,
        sum_s=measured.sum_s,
        objective=objective,
        wire=wire,
        seed=seed,
    ).again(placer=placer)
    return replace(plan, is_verified=verify(plan, model, traced, batch))


def _devices(
    devices: int | Sequence[Device], slow: Mapping[int, float] | None, memory_bytes: int | None
) -> tuple[Device, ...]:
    number = devices if isinstance(devices, int) else len(devices)
    if not 1 <= number <= _MOST_DEVICES:
        raise UsageError(f"devices must be from 1 to {_MOST_DEVICES}, not {number}.")
    found = [Device()] * devices if isinstance(devices, int) else list(devices)
    for index, factor in (slow or {}).items():
        if not 0 <= index < len(found):
            raise UsageError(f"Device {index} cannot be slow: there are {len(found)} devices, numbered from 0.")
        found[index] = replace(found[index], slowness=found[index].slowness * factor)
    for index, one in enumerate(found):
        if not 0 < one.slowness < math.inf:
            raise UsageError(f"Device {index} cannot take {one.slowness} times as long: give a number above 0.")
    if memory_bytes is not None:
        if memory_bytes <= 0:
            raise UsageError(f"memory_bytes must be above 0, not {memory_bytes}.")
        found = [replace(one, memory_bytes=memory_bytes) for one in found]
    return tuple(found)


def _link_of(cluster: Any) -> Link:
    """A cluster's usual link: its latency includes sending and receiving, and its bandwidth leaves out the sender's copy."""
    busy_s = min(Link.busy_s, cluster.latency_s / 2)
    s_per_byte = 1 / cluster.bandwidth_bytes_per_s + COPY_VECTORS / cluster.core_bytes_per_s
    return Link(latency_s=cluster.latency_s - 2 * busy_s, bytes_per_s=1 / s_per_byte, busy_s=busy_s)


def _microbatches(objective: str, microbatches: int | None) -> int:
    if objective not in ("latency", "throughput"):
        raise UsageError(f"objective must be latency or throughput, not {shown(objective)}.")
    if objective == "latency":
        if microbatches not in (None, 1):
            raise UsageError('Micro-batches are for objective="throughput"; latency is the time of one whole batch.')
        return 1
    number = 8 if microbatches is None else microbatches
    if number < 1:
        raise UsageError(f"microbatches must be 1 or more, not {number}.")
    return number


def _traced(model: nn.Module, example: Any) -> tuple[Traced, bool]:
    try:
        model.apply(lambda _: None)
    except RecursionError:
        raise UsageError(
            f"A module of {type(model).__name__} is its own submodule, which PyTorch cannot save or copy: keep its parent in a"
            " tuple, as in self.parent = (parent,)."
        ) from None
    with in_training_mode(model):
        traced = trace(model, example)
        model.eval()
        try:
            other = trace(model, example).text
        except UsageError:
            other = ""
    if all(one.is_local for one in traced.nodes):
        raise UsageError(f"{type(model).__name__} computes nothing with its inputs: there is nothing to place.")
    return traced, other == traced.text


def _constraints(
    traced: Traced, machines: Sequence[Device], pins: Mapping[str, int | str], together: Sequence[tuple[str, str]]
) -> tuple[dict[str, tuple[int, ...]], list[tuple[str, str]]]:
    """The devices allowed for each pinned operation, and pairs that must be together."""
    asked: dict[str, tuple[str, int | str]] = {}
    allowed: dict[str, tuple[int, ...]] = {}
    for name, where in pins.items():
        if isinstance(where, str):
            devices = tuple(d for d, one in enumerate(machines) if one.kind == where)
            if not devices:
                kinds = ", ".join(sorted({one.kind for one in machines}))
                raise UsageError(f"{name} is pinned to a device of kind {shown(where)}, but there are only: {kinds}.")
        elif 0 <= where < len(machines):
            devices = (where,)
        else:
            raise UsageError(
                f"{name} is pinned to device {where}, but there are {len(machines)} devices, numbered from 0."
            )
        for node in find_nodes(traced, name):
            if node in allowed and not set(allowed[node]) & set(devices):
                other, there = asked[node]
                raise UsageError(
                    f"The pins {other}: {there} and {name}: {where} conflict over {node}: leave one of them out."
                )
            allowed[node] = tuple(d for d in allowed.get(node, devices) if d in devices)
            asked[node] = name, where
    pairs = []
    for a, b in together:
        first, *rest = [*find_nodes(traced, a), *find_nodes(traced, b)]
        pairs += [(first, other) for other in rest]
    return allowed, pairs
