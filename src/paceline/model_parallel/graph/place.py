"""Placers: from a problem to a device for each group; all deterministic, ties go to the lower number."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from paceline.errors import UsageError, shown
from paceline.model_parallel.graph.orders import BETTER, OrderSearch, Paths
from paceline.model_parallel.graph.problem import Bounds, Problem, bounds, check_memory
from paceline.model_parallel.graph.schedule import Schedule, longest_remaining, remaining_s, simulate
from paceline.specs.text import closest

_MOST_EXACT_GROUPS = 14
_MOST_ORDERED_GROUPS = 10  # of which all orders are searched as well
_MOST_EXACT_DEVICES = 4
_MOST_BEGINNINGS = 50_000  # of complete and partial placements
_MOST_LOOKS = 5_000  # simulated placements; bounds the time, and makes the result independent of the machine
_MOST_ORDERS = 20_000  # simulated orders, also of their beginnings


@dataclass(frozen=True)
class Placement:
    """A device for each group, the order in which they run, and the time of the resulting step."""

    placer: str
    device_of: tuple[int, ...]
    order: tuple[int, ...]
    makespan_s: float
    is_certain: bool = False  # no other device and order of these groups is faster in simulation


def finish_soonest(problem: Problem) -> tuple[int, ...] | None:
    """The white paper's: in graph order, each group goes where it finishes soonest, including transfers of its inputs."""
    return _one_by_one(problem, range(len(problem.groups)))


def critical_path(problem: Problem) -> tuple[int, ...] | None:
    """HEFT: the group with the longest remaining path first, each where it finishes soonest, using earlier gaps as well.

    Topcuoglu et al., "Performance-effective and low-complexity task scheduling for heterogeneous computing", 2002.
    """
    rank = remaining_s(problem)
    order = sorted(range(len(problem.groups)), key=lambda one: (-rank[one], one))
    return _one_by_one(problem, order, fills_gaps=True)


def earliest_first(problem: Problem) -> tuple[int, ...] | None:
    """m-ETF: of all ready groups and devices with enough memory, the pair that can start soonest.

    Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", 2020.
    """
    state, rank = _Partial(problem), remaining_s(problem)
    producers = [{problem.tensors[t].producer for t in reads} for reads in problem.reads]
    sorter = TopologicalSorter(dict(enumerate(producers)))
    sorter.prepare()
    all_devices = range(len(problem.devices))
    arrived_s: dict[int, list[float]] = {}  # of the groups that are ready
    while sorter:
        for group in sorter.get_ready():
            arrived_s[group] = [state.arrival_s(group, device) for device in all_devices]
        free_s = [state.free_s(device) for device in all_devices]
        start_s, soonest = float("inf"), list[tuple[int, int]]()
        for one, arrived in arrived_s.items():
            for device in state.devices_for(one):
                could_s = arrived[device] if arrived[device] > free_s[device] else free_s[device]
                if could_s < start_s:
                    start_s, soonest = could_s, [(one, device)]
                elif could_s == start_s:
                    soonest.append((one, device))
        if not soonest:
            return None
        group, device = min(soonest, key=lambda pair: (-rank[pair[0]], state.took_s(*pair), pair))
        took_s = state.took_s(group, device)
        state.put(group, device, start_s, start_s + took_s)
        del arrived_s[group]
        sorter.done(group)
    return tuple(state.device_of)


def balanced(problem: Problem) -> tuple[int, ...] | None:
    """A chain of stages: the groups in order, cut to minimise the slowest device's work. For micro-batches."""
    num, k = len(problem.groups), len(problem.devices)
    work = [0.0]
    for group in problem.groups:
        work.append(work[-1] + group.step_s)
    best: list[list[tuple[float, int]]] = [[(work[i] * problem.devices[0].slowness, 0) for i in range(num + 1)]]
    for d in range(1, k):
        slowness, before = problem.devices[d].slowness, best[-1]
        row = []
        for i in range(num + 1):
            # Work before the cut grows with it, work after it shrinks: the best cut is where they cross.
            cross = bisect_left(range(i), True, key=lambda j, i=i: before[j][0] >= (work[i] - work[j]) * slowness)
            cuts = {max(0, cross - 1), cross}
            row.append(min((max(before[j][0], (work[i] - work[j]) * slowness), j) for j in cuts))
        best.append(row)
    device_of, end = [0] * num, num
    for d in range(k - 1, 0, -1):
        begin = best[d][end][1]
        device_of[begin:end] = [d] * (end - begin)
        end = begin
    for first, members in problem.members.items():  # constrained groups follow the first of them
        for group in members:
            device_of[group] = device_of[first]
    return tuple(device_of) if problem.fits(device_of) else None


def all_on_one(problem: Problem) -> tuple[int, ...] | None:
    """Everything on the fastest device with enough memory; wins more often than people expect."""
    for device in sorted(range(len(problem.devices)), key=lambda one: (problem.devices[one].slowness, one)):
        placed = (device,) * len(problem.groups)
        if problem.fits(placed):
            return placed
    return None


#: By name, all except the exact one, which starts from the best of these.
PLACERS: dict[str, Callable[[Problem], tuple[int, ...] | None]] = {
    "all-on-one": all_on_one,
    "finish-soonest": finish_soonest,
    "earliest-first": earliest_first,
    "critical-path": critical_path,
    "balanced": balanced,
}


#: Results of the search: proven to be the best, or not.
SEARCHED = ("exact", "best-found")


def check_placer(placer: str | None) -> None:
    """Raises `UsageError` unless a placer, or a result of the search, has this name."""
    known = [*PLACERS, *SEARCHED]
    if placer is not None and placer not in known:
        raise UsageError(f"Unknown placer {shown(placer)}.{closest(placer, known)} Known: {', '.join(known)}.")


def candidates(problem: Problem) -> tuple[list[Placement], Bounds]:
    """All placers' placements, the shortest simulated step first, and the lower bounds.

    All placements of at most 14 groups on at most 4 devices are tried in two orders; of at most 10 groups, branch and bound
    searches all orders, too. If that search completes, or a step is as short as a lower bound, no placement is better.

    Costs: milliseconds; up to some seconds for the search.

    Raises:
        UsageError: no device has enough memory for groups that must be together, or all devices together do not.
    """
    check_memory(problem)
    below = bounds(problem)
    found = []
    for name, placer in PLACERS.items():
        device_of = placer(problem)
        if device_of is not None and problem.fits(device_of):
            found.append(_placement(problem, name, device_of))
    is_small = len(problem.members) <= _MOST_EXACT_GROUPS and len(problem.groups) <= 2 * _MOST_EXACT_GROUPS
    if is_small and len(problem.devices) <= _MOST_EXACT_DEVICES:
        placed = _searched(problem, min(found, key=lambda one: one.makespan_s, default=None), OrderSearch(problem, 0))
        if placed is not None and len(problem.groups) <= _MOST_ORDERED_GROUPS:
            placed = _searched(problem, placed, OrderSearch(problem, _MOST_ORDERS)) or placed
        if placed is not None:
            found.append(placed)
    proven_s = max([below.least_s, *(one.makespan_s for one in found if one.is_certain)])
    found = [replace(one, is_certain=one.makespan_s <= proven_s / BETTER) for one in found]
    if not found:
        raise UsageError(
            "No placer found a placement that fits the devices' memory and keeps together the operations that must "
            "share a device: allow more memory or fewer pins."
        )
    preferred = ["all-on-one", *SEARCHED, *PLACERS]
    found.sort(key=lambda one: (one.makespan_s, preferred.index(one.placer)))
    return found, below


def best_of(problem: Problem, device_of: Sequence[int]) -> tuple[Schedule, tuple[int, ...]]:
    """A placement's step in the better of two orders: the model's own, and longest remaining path first."""
    orders = (tuple(range(len(problem.groups))), longest_remaining(problem))
    runs = [simulate(problem, device_of, order) for order in orders]
    chosen = min(range(2), key=lambda one: (runs[one].makespan_s, one))
    return runs[chosen], orders[chosen]


def _placement(problem: Problem, name: str, device_of: Sequence[int]) -> Placement:
    run, order = best_of(problem, device_of)
    return Placement(name, tuple(device_of), order, run.makespan_s)


class _Partial:
    """A partial placement: the groups' devices and end times, and the remaining memory."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.device_of = [-1] * len(problem.groups)
        self._end_s = [0.0] * len(problem.groups)
        self._busy: list[list[tuple[float, float]]] = [[] for _ in problem.devices]
        self._used = [0] * len(problem.devices)
        self._is_limited = any(one.memory_bytes is not None for one in problem.devices)
        self._memory = {first: problem.memory_of_class(first) for first in problem.members}

    def devices_for(self, group: int) -> Sequence[int]:
        """Allowed devices with enough memory."""
        first, choices = self.problem.class_of[group], self.problem.choices[group]
        for one in self.problem.members[first]:
            if self.device_of[one] >= 0:
                return (self.device_of[one],)
        if not self._is_limited:
            return choices
        limits = [one.memory_bytes for one in self.problem.devices]
        need = self._memory[first]
        return [d for d in choices if (limit := limits[d]) is None or self._used[d] + need <= limit]

    def took_s(self, group: int, device: int) -> float:
        """The time of both of its passes there."""
        return self.problem.groups[group].step_s * self.problem.devices[device].slowness

    def free_s(self, device: int) -> float:
        return self._busy[device][-1][1] if self._busy[device] else 0.0

    def arrival_s(self, group: int, device: int) -> float:
        ready_s = 0.0
        for t in self.problem.reads[group]:
            tensor = self.problem.tensors[t]
            moved_s = self._end_s[tensor.producer]
            if self.device_of[tensor.producer] != device:
                link = self.problem.links[self.device_of[tensor.producer]][device]
                moved_s += link.move_s(tensor.num_bytes) * (2 if tensor.has_gradient else 1)
            ready_s = max(ready_s, moved_s)
        return ready_s

    def start_s(self, group: int, device: int, *, fills_gaps: bool) -> float:
        ready_s, busy = self.arrival_s(group, device), self._busy[device]
        if not fills_gaps:
            return max(ready_s, self.free_s(device))
        took_s, free_s = self.took_s(group, device), 0.0
        for begin_s, end_s in busy:
            if max(free_s, ready_s) + took_s <= begin_s:
                break
            free_s = end_s
        return max(free_s, ready_s)

    def put(self, group: int, device: int, start_s: float, end_s: float) -> None:
        first = self.problem.class_of[group]
        if all(self.device_of[one] < 0 for one in self.problem.members[first]):
            self._used[device] += self._memory[first]
        self.device_of[group], self._end_s[group] = device, end_s
        self._busy[device].append((start_s, end_s))
        self._busy[device].sort()


def _one_by_one(problem: Problem, order: Sequence[int], *, fills_gaps: bool = False) -> tuple[int, ...] | None:
    state = _Partial(problem)
    for group in order:
        ends = []
        for device in state.devices_for(group):
            start_s = state.start_s(group, device, fills_gaps=fills_gaps)
            ends.append((start_s + state.took_s(group, device), device, start_s))
        if not ends:
            return None
        end_s, device, start_s = min(ends)
        state.put(group, device, start_s, end_s)
    return tuple(state.device_of)


def _searched(problem: Problem, known: Placement | None, orders: OrderSearch) -> Placement | None:
    """The best of all placements of the classes, without those whose lower bound is the time of the best known step.

    None: there were too many.
    """
    firsts, devices = sorted(problem.members), problem.devices
    work = {first: sum(problem.groups[one].step_s for one in problem.members[first]) for first in firsts}
    left = [0.0] * (len(firsts) + 1)
    for index in reversed(range(len(firsts))):
        left[index] = left[index + 1] + work[firsts[index]]
    speed = sum(1.0 / one.slowness for one in devices)
    best, best_s = known, known.makespan_s if known is not None else float("inf")
    chosen: dict[int, int] = {}
    loads, looks, beginnings = [0.0] * len(devices), 0, 0

    def go(index: int) -> bool:
        """Whether all placements with the current prefix have been tried."""
        nonlocal best, best_s, looks, beginnings
        beginnings += 1
        if beginnings > _MOST_BEGINNINGS:
            return False
        done = sum(load / one.slowness for load, one in zip(loads, devices, strict=True))
        if max(*loads, (done + left[index]) / speed) * problem.microbatches >= best_s:
            return True
        device_of = [chosen.get(first, -1) for first in problem.class_of]
        if Paths(problem, device_of).least_s >= best_s * BETTER:
            return True
        if index == len(firsts):
            looks += 1
            if problem.fits(device_of):
                tried = _placement(problem, "exact", device_of)
                best = min((one for one in (best, tried) if one is not None), key=lambda one: one.makespan_s)
                if (ordered := orders.shortest(device_of, best.makespan_s)) is not None:
                    best = Placement("exact", tuple(device_of), *ordered)
                best_s = best.makespan_s
            return looks <= _MOST_LOOKS
        seen: set[tuple[float, object, str]] = set()
        used = set(chosen.values())
        for device in problem.choices[firsts[index]]:
            alike = (devices[device].slowness, devices[device].memory_bytes, devices[device].kind)
            if device not in used and not problem.allowed and not problem.link_factors:
                if alike in seen:  # equivalent to another empty device
                    continue
                seen.add(alike)
            chosen[firsts[index]] = device
            loads[device] += work[firsts[index]] * devices[device].slowness
            is_whole = go(index + 1)
            loads[device] -= work[firsts[index]] * devices[device].slowness
            del chosen[firsts[index]]
            if not is_whole:
                return False
        return True

    if not go(0) or best is None:
        return None
    is_proven = orders.looks > 0
    return replace(best, placer=SEARCHED[not is_proven], is_certain=is_proven)
