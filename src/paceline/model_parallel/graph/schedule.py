"""A placement's step, simulated in time only: devices run their operations, and links their transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

from paceline.model_parallel.graph.partition import Operation, Transfer, programs
from paceline.model_parallel.graph.problem import Problem


@dataclass(frozen=True, slots=True)
class Event:
    """An interval of the simulated step."""

    kind: str  # "forward" or "backward" of a group, "move" of a tensor or "return" of its gradient
    name: str  # the group's, or the tensor's
    place: int  # the device, or the transfer's source
    to: int  # a transfer's destination; a group's: -1
    start_s: float  # from the step's beginning
    end_s: float  # from the step's beginning
    microbatch: int = 0  # its index
    num_bytes: int = 0  # of a transfer


@dataclass(frozen=True)
class Schedule:
    """The result of a simulated step."""

    makespan_s: float  # duration of the forward and backward passes
    busy_s: tuple[float, ...]  # compute time by device
    events: tuple[Event, ...] = ()  # in the order in which they began; empty unless recorded

    @property
    def bubble(self) -> float:
        """Share of the devices' time that they spend waiting, from 0 to 1."""
        whole = self.makespan_s * len(self.busy_s)
        return 1.0 - sum(self.busy_s) / whole if whole else 0.0


def longest_remaining(problem: Problem) -> tuple[int, ...]:
    """An order of all groups: of the ready groups, the one with the longest remaining path comes first."""
    rank = remaining_s(problem)
    return tuple(in_order(dict(enumerate(problem.earlier)), lambda group: (-rank[group], group)))


def in_order(earlier: Mapping[int, Iterable[int]], key: Callable[[int], Any]) -> Iterator[int]:
    """Each comes after the `earlier` ones; of those that are ready, the one with the least key comes first."""
    sorter = TopologicalSorter(earlier)
    sorter.prepare()
    ready: list[int] = []
    while sorter:
        ready += sorter.get_ready()
        yield (first := min(ready, key=key))
        ready.remove(first)
        sorter.done(first)


def remaining_s(problem: Problem) -> list[float]:
    """By group, the longest path from its start to the end of the step, with half of all transfers on it."""
    speed = sum(one.slowness for one in problem.devices) / len(problem.devices)
    share = 1.0 - 1.0 / len(problem.devices)
    rank = [0.0] * len(problem.groups)
    for group in reversed(range(len(problem.groups))):
        behind = 0.0
        for t in problem.makes[group]:
            tensor = problem.tensors[t]
            move_s = share * problem.link.move_s(tensor.num_bytes) * (2 if tensor.has_gradient else 1)
            behind = max([behind, *(move_s + rank[reader] for reader in tensor.consumers)])
        rank[group] = problem.groups[group].step_s * speed + behind
    return rank


def simulate(
    problem: Problem,
    device_of: Sequence[int],
    order: Sequence[int] | None = None,
    *,
    records: bool = False,
) -> Schedule:
    """One step: all micro-batches' forward passes, then all their backward passes, latest first.

    Costs: time proportional to groups and transfers, about 2 us each.
    """
    order = range(len(problem.groups)) if order is None else order
    return Run(problem, records=records).run(programs(problem, device_of, order))


class Run:
    """A simulated step in progress."""

    def __init__(self, problem: Problem, *, records: bool) -> None:
        self.problem, self.records = problem, records
        num = len(problem.devices)
        self.free = [0.0] * num
        self.busy = [0.0] * num
        self.links: dict[tuple[int, int], float] = {}
        self.arrived: dict[tuple[str, int, Transfer, int], float] = {}
        self.events: list[Event] = []

    def run(self, forward: list[list[Operation]]) -> Schedule:
        """Runs the whole step, given each device's operations of the forward pass."""
        number = self.problem.microbatches
        self._phase("forward", forward, range(number))
        self._phase("backward", [list(reversed(one)) for one in forward], range(number - 1, -1, -1))
        self.events.sort(key=lambda one: (one.start_s, one.place, one.to))
        return Schedule(max(self.free), tuple(self.busy), tuple(self.events))

    def forward_only(self, forward: list[list[Operation]]) -> list[float]:
        """The time at which each device has run its operations, which may be the first ones of a step."""
        self._phase("forward", forward, range(1))
        return self.free

    def _phase(self, phase: str, lists: list[list[Operation]], microbatches: Sequence[int]) -> None:
        """Runs the devices in turn, each until it waits for a transfer."""
        todo = [[(m, one) for m in microbatches for one in own] for own in lists]
        at = [0] * len(todo)
        moved = True
        while moved:
            moved = False
            for device, own in enumerate(todo):
                while at[device] < len(own) and self._do(phase, device, *own[at[device]]):
                    at[device] += 1
                    moved = True
        assert all(a == len(own) for a, own in zip(at, todo, strict=True)), "the devices wait for each other"

    def _do(self, phase: str, device: int, microbatch: int, one: Operation) -> bool:
        if one.kind == "run":
            group = self.problem.groups[one.group]
            took_s = group.forward_s if phase == "forward" else group.backward_s
            self._compute(phase, group.name, device, took_s * self.problem.devices[device].slowness, microbatch)
            return True
        transfer = one.transfer
        assert transfer is not None
        if one.kind == ("send" if phase == "forward" else "give"):
            self._send(phase, device, microbatch, transfer, one.reader)
            return True
        if one.kind != ("receive" if phase == "forward" else "take"):
            return True
        arrived_s = self.arrived.get((phase, microbatch, transfer, one.reader))
        if arrived_s is None:
            return False
        self.free[device] = max(self.free[device], arrived_s) + self.problem.link.busy_s
        return True

    def _compute(self, phase: str, name: str, device: int, took_s: float, microbatch: int) -> None:
        start_s = self.free[device]
        self.free[device] = start_s + took_s
        self.busy[device] += took_s
        if self.records:
            self.events.append(Event(phase, name, device, -1, start_s, start_s + took_s, microbatch))

    def _send(self, phase: str, device: int, microbatch: int, transfer: Transfer, reader: int) -> None:
        tensor = self.problem.tensors[transfer.tensor]
        to = transfer.to if phase == "forward" else transfer.source
        link = self.problem.links[device][to]
        self.free[device] += link.busy_s
        queue = (-1, -1) if link.is_shared else (device, to)
        start_s = max(self.free[device], self.links.get(queue, 0.0))
        self.links[queue] = end_s = start_s + tensor.num_bytes / link.bytes_per_s
        self.arrived[phase, microbatch, transfer, reader] = end_s + link.latency_s
        if self.records:
            kind = "move" if phase == "forward" else "return"
            self.events.append(
                Event(kind, tensor.node, device, to, start_s, end_s + link.latency_s, microbatch, tensor.num_bytes)
            )
