"""Measures groups of operations, in blocks while the other cores are busy, and compares the sum with a whole step."""

from __future__ import annotations

import copy
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.model_parallel.graph.capture import GraphRunner
from paceline.model_parallel.graph.micro_batches import mapped
from paceline.model_parallel.graph.problem import Group
from paceline.model_parallel.graph.trace import Traced, inputs_unchanged, tensors_in
from paceline.system.machine import intra_op_threads
from paceline.system.torch_random import torch_undisturbed

#: Of both passes; in a shorter block, starting the backward pass dominates the measurement.
LEAST_BLOCK_S = 1e-3
_MOST_IQR = 0.1  # over the median; above it, other programs have disturbed a block
_MOST_ROUNDS = 4  # of measuring a block again
_FLOPS_PER_BYTE = 5.0  # operations of a core in the time of reading or writing a byte: some 50 GFLOP/s and 10 GB/s
_STATE_COPIES = 4  # a parameter, its gradient, and two for an optimizer such as Adam


@dataclass(frozen=True)
class Measured:
    """Groups with their times, and the error of these."""

    groups: tuple[Group, ...]
    step_s: float
    sum_s: float

    @property
    def error(self) -> float:
        """Difference between the sum and the whole, relative to the whole."""
        return abs(self.sum_s - self.step_s) / self.step_s if self.step_s else 0.0


def measure(
    model: nn.Module,
    traced: Traced,
    groups: Sequence[Sequence[str]],
    arguments: dict[str, Any],
    *,
    repeats: int = 5,
    busy_cores: int = 1,
) -> Measured:
    """Medians of `repeats` runs after a warm-up, each group with a whole step beside it, with one thread.

    Gradients of ones replace those of the loss. Further cores compute meanwhile, as the other workers will. Each time is
    divided by that of the whole step beside it, as a core can become slower for some seconds. Groups whose shares still vary,
    because other programs computed at the same time, are measured again; of up to four rounds, the steadiest counts.

    Costs: a copy of the model, and `2 * (repeats + 1)` steps; four times as many on a busy machine.
    """
    twin = copy.deepcopy(model)
    runner = _Runner(twin, traced)
    runs = [partial(runner.group, names) for names in groups]
    shares: list[list[tuple[float, float]]] = [[] for _ in runs]
    steps_s: list[float] = []
    with torch_undisturbed(), torch.enable_grad(), intra_op_threads(1), _busy(busy_cores):
        runner.whole(arguments)
        for run in runs:
            run()
        flops = [runner.flops(names) for names in groups]
        for _ in range(_MOST_ROUNDS):
            due = [at for at, one in enumerate(shares) if _relative_iqr(one) > _MOST_IQR]
            if not due:
                break
            again: dict[int, list[tuple[float, float]]] = {at: [] for at in due}
            for _ in range(repeats):
                whole_s = runner.whole(arguments)
                steps_s.append(whole_s)
                for at, own in again.items():
                    forward_s, backward_s = runs[at]()
                    own.append((forward_s / whole_s, backward_s / whole_s))
            for at in due:
                shares[at] = min(shares[at], again[at], key=_relative_iqr)
    step_s = statistics.median(steps_s)
    medians = [[step_s * statistics.median(one) for one in zip(*own, strict=True)] for own in shares]
    sizes = dict((*twin.named_parameters(), *twin.named_buffers()))
    trained = dict(twin.named_parameters())
    result = []
    for at, names in enumerate(groups):
        own = [one for one in traced.nodes if one.name in set(names)]
        state = tuple(dict.fromkeys(name for one in own for name in one.state))
        copies = [_STATE_COPIES if name in trained and trained[name].requires_grad else 1 for name in state]
        result.append(
            Group(
                name=names[-1],
                nodes=tuple(names),
                forward_s=medians[at][0],
                backward_s=medians[at][1],
                state=state,
                state_bytes=sum(sizes[name].nbytes * c for name, c in zip(state, copies, strict=True)),
                saved_bytes=sum(one.num_bytes for one in own),
                flops=flops[at],
            )
        )
    return Measured(tuple(result), step_s, sum(one.step_s for one in result))


def _relative_iqr(times: Sequence[tuple[float, float]]) -> float:
    """Interquartile range of the sums over their median; infinite if nothing was measured."""
    if len(times) < 2:
        return 0.0 if times else math.inf
    low_s, median_s, high_s = statistics.quantiles(map(sum, times), n=4, method="inclusive")
    return (high_s - low_s) / median_s if median_s else 0.0


def spread(groups: Sequence[Group], blocks: Sequence[Sequence[int]], measured: Sequence[Group]) -> tuple[Group, ...]:
    """The groups with shares of the times of the blocks in which they were measured.

    Shares are proportional to floating-point operations. A group's outputs are written and read, so their bytes count as
    well: activation functions, pooling and norms have few operations that PyTorch counts.
    """
    found = list(groups)
    for members, block in zip(blocks, measured, strict=True):
        weights = [groups[one].flops + 2 * _FLOPS_PER_BYTE * groups[one].saved_bytes for one in members]
        total = sum(weights)
        for one, weight in zip(members, weights, strict=True):
            share = weight / total if total else 1.0 / len(members)
            found[one] = replace(groups[one], forward_s=share * block.forward_s, backward_s=share * block.backward_s)
    return tuple(found)


class _Runner(GraphRunner):
    def __init__(self, model: nn.Module, traced: Traced) -> None:
        super().__init__(model, traced.graph)
        self._traced = traced
        self._by_name = {node.name: node for node in traced.graph.nodes}
        self._kinds = {one.name: one for one in traced.nodes}

    def whole(self, arguments: dict[str, Any]) -> float:
        """Seconds of a step, both passes."""
        self.module.zero_grad()
        begun_s = time.perf_counter()
        with inputs_unchanged(self.module, arguments):
            out = self.module(**arguments)  # type: ignore[operator]
        if ends := [one for one in tensors_in(out) if one.requires_grad]:
            torch.autograd.backward(ends, [torch.ones_like(one) for one in ends])
        return time.perf_counter() - begun_s

    def group(self, names: Sequence[str]) -> tuple[float, float]:
        self.module.zero_grad()
        self._prepare(names)
        begun_s = time.perf_counter()
        self._forward(names)
        done_s = time.perf_counter()
        inner = {i for name in names for i in self._kinds[name].inputs}
        ends = [self.env[self._by_name[name]] for name in names if name not in inner or name in self._traced.outputs]
        ends = [one for value in ends for one in tensors_in(value) if one.requires_grad]
        gradients = [torch.ones_like(one) for one in ends]
        ready_s = time.perf_counter()
        if ends:
            torch.autograd.backward(ends, gradients)
        return done_s - begun_s, time.perf_counter() - ready_s

    def flops(self, names: Sequence[str]) -> float:
        with torch.no_grad():  # PyTorch's counter adds hooks to tensors that need gradients; counting needs none
            self._prepare(names)
            with FlopCounterMode(display=False) as counter:
                self._forward(names)
        return float(counter.get_total_flops())

    def _prepare(self, names: Sequence[str]) -> None:
        """Sets a group's inputs, as if they came from another worker."""
        self.env = {}
        own = set(names)
        for name in names:
            for one in self._by_name[name].all_input_nodes:
                if one.name in own or one in self.env:
                    continue
                if one.op == "get_attr":
                    self.env[one] = self.fetch_attr(str(one.target))
                    continue
                self.env[one] = mapped(self._traced.values[one.name], _fresh)

    def _forward(self, names: Sequence[str]) -> None:
        for name in names:
            node = self._by_name[name]
            self.env[node] = self.run_node(node)


def _fresh(value: torch.Tensor) -> torch.Tensor:
    """The value as if it came from another worker; not a leaf, so that in-place changes are allowed."""
    return value.detach().clone().requires_grad_().clone() if value.requires_grad else value.detach().clone()


@contextmanager
def _busy(cores: int) -> Iterator[None]:
    """Keeps this many other cores busy with matrix products, which hold the GIL only for microseconds."""
    cores = min(cores, (os.cpu_count() or 1) - 1)
    over = threading.Event()

    def work() -> None:
        a = torch.ones(384, 384)
        out = torch.empty(384, 384)
        while not over.is_set():
            torch.mm(a, a, out=out)

    threads = [threading.Thread(target=work, name="paceline-busy", daemon=True) for _ in range(cores)]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        over.set()
        for one in threads:
            one.join()
