"""The order in which a placement's groups run: branch and bound over all orders that respect the graph."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.model_parallel.graph.partition import Operation, programs
from paceline.model_parallel.graph.problem import Problem
from paceline.model_parallel.graph.schedule import Run, simulate

BETTER = 1 - 1e-9  # by more than rounding differences


class Paths:
    """Lower bounds on a placement's step in every order; a group on device -1 is not placed yet."""

    def __init__(self, problem: Problem, device_of: Sequence[int]) -> None:
        groups, tensors, num = problem.groups, problem.tensors, len(problem.groups)
        fastest = min(one.slowness for one in problem.devices)
        slowness = [problem.devices[d].slowness if d >= 0 else fastest for d in device_of]
        self.forward_s = [one.forward_s * factor for one, factor in zip(groups, slowness, strict=True)]
        self.backward_s = [one.backward_s * factor for one, factor in zip(groups, slowness, strict=True)]
        edges: list[list[tuple[int, float, bool]]] = [[] for _ in range(num)]  # consumer, its transfer, gradient
        for one in tensors:
            for to in one.consumers:
                a, b = device_of[one.producer], device_of[to]
                moved_s = problem.links[a][b].move_s(one.num_bytes) if a != b and min(a, b) >= 0 else 0.0
                edges[one.producer].append((to, moved_s, one.has_gradient))
        start_s, after_s = [0.0] * num, [0.0] * num  # of the forward pass; from the backward pass to the step's end
        for g in range(num):
            for to, moved_s, has_gradient in edges[g]:
                start_s[to] = max(start_s[to], start_s[g] + self.forward_s[g] + moved_s)
                if has_gradient:
                    after_s[to] = max(after_s[to], moved_s + self.backward_s[g] + after_s[g])
        self.to_end_s = [0.0] * num  # by group, from the start of its forward pass
        there_and_back_s = [0.0] * num
        for g in reversed(range(num)):
            inner_s = max([0.0, *(2 * moved_s + there_and_back_s[to] for to, moved_s, has in edges[g] if has)])
            there_and_back_s[g] = self.forward_s[g] + inner_s + self.backward_s[g]
            later = [self.forward_s[g] + moved_s + self.to_end_s[to] for to, moved_s, _ in edges[g]]
            self.to_end_s[g] = max(there_and_back_s[g] + after_s[g], *later, 0.0)
        #: Seconds that the step needs.
        self.least_s = max(map(sum, zip(start_s, self.to_end_s, strict=True)), default=0.0)
        self.after_device_s = [0.0] * len(problem.devices)
        for device in set(device_of) - {-1}:
            own = [g for g in range(num) if device_of[g] == device]
            work_s = sum(self.forward_s[g] + self.backward_s[g] for g in own) * problem.microbatches
            self.after_device_s[device] = min(after_s[g] for g in own)
            earliest_s = min(start_s[g] for g in own)
            self.least_s = max(self.least_s, earliest_s + work_s + self.after_device_s[device])


class OrderSearch:
    """Finds shorter orders of placements, as long as its budget lasts."""

    def __init__(self, problem: Problem, looks: int) -> None:
        self.problem = problem
        self.looks = looks  # simulated orders and beginnings of orders that are left
        # Micro-batches run their groups in turn, and a shared queue serves all devices: no beginning tells when it ends.
        self._begins_alone = problem.microbatches == 1 and not problem.link.is_shared

    def shortest(self, device_of: Sequence[int], than_s: float) -> tuple[tuple[int, ...], float] | None:
        """The shortest order and its step's time, if it is below `than_s`; None: none is, or the budget has ended."""
        problem, paths = self.problem, Paths(self.problem, device_of)
        best: tuple[tuple[int, ...], float] | None = None
        seen: set[object] = set()

        def go(prefix: tuple[int, ...]) -> None:
            nonlocal best, than_s
            if self.looks <= 0 or paths.least_s >= than_s * BETTER:
                return
            self.looks -= 1
            if len(prefix) == len(problem.groups):
                took_s = simulate(problem, device_of, prefix).makespan_s
                if took_s < than_s * BETTER:
                    best, than_s = (prefix, took_s), took_s
                return
            lists = programs(problem, device_of, prefix)
            key = frozenset(prefix), tuple(map(tuple, lists))
            if key in seen:
                return
            seen.add(key)
            done = set(prefix)
            if self._begins_alone and self._least_s(device_of, paths, lists, done) >= than_s * BETTER:
                return
            ready = [g for g in range(len(problem.groups)) if g not in done and problem.earlier[g] <= done]
            for group in sorted(ready, key=lambda g: (-paths.to_end_s[g], g)):
                go((*prefix, group))

        go(())
        return best

    def _least_s(self, device_of: Sequence[int], paths: Paths, lists: list[list[Operation]], done: set[int]) -> float:
        free_s = Run(self.problem, records=False).forward_only(lists)
        left_s = [free + after for free, after in zip(free_s, paths.after_device_s, strict=True)]
        least_s = 0.0
        for group, device in enumerate(device_of):
            left_s[device] += paths.backward_s[group]
            if group not in done:
                left_s[device] += paths.forward_s[group]
                least_s = max(least_s, free_s[device] + paths.to_end_s[group])
        return max(least_s, *left_s)
