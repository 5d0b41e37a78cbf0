"""Placements of three architectures on 50 unequal simulated devices, and the bubble of a pipeline. Simulated only.

    python benchmarks/fidelity/placement.py [--write]

Mayer, Mayer and Laich (2017, arXiv:1711.01912) simulate 50 unequal devices and find that strategies aware of the critical path
end a step up to 4 times sooner than hash placement with FIFO order. Here groups take what their floating-point operations
take at 20 GFLOP/s on a device of speed 1, so that every machine prints the same. Takes about a minute.

It also measures what any rule for when tensors are sent could gain, such as the white paper's receives as late as possible.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from page import show
from torch import nn

from paceline.model_parallel.graph.capture import arguments_of
from paceline.model_parallel.graph.coarsen import blocks_of, tensors_of
from paceline.model_parallel.graph.cost import measure
from paceline.model_parallel.graph.partition import Operation, Transfer, programs
from paceline.model_parallel.graph.place import PLACERS, candidates
from paceline.model_parallel.graph.problem import Device, Group, Link, Problem, TensorInfo, bounds
from paceline.model_parallel.graph.schedule import Run, longest_remaining, simulate
from paceline.model_parallel.graph.trace import trace

DEVICES, FLOPS_PER_S, LEAST_S = 50, 20e9, 5e-6
LINK = Link(latency_s=5e-5, bytes_per_s=1.25e9, busy_s=1e-5)


class Branches(nn.Module):
    """Inception's module: four branches, joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        quarter = channels // 4
        self.one = nn.Sequential(nn.Conv2d(channels, quarter, 1), nn.ReLU())
        self.three = nn.Sequential(
            nn.Conv2d(channels, quarter, 1), nn.ReLU(), nn.Conv2d(quarter, quarter, 3, padding=1), nn.ReLU()
        )
        self.five = nn.Sequential(
            nn.Conv2d(channels, quarter, 1), nn.ReLU(), nn.Conv2d(quarter, quarter, 5, padding=2), nn.ReLU()
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, quarter, 1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (n, channels, h, w), as many out."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def inception() -> tuple[nn.Module, torch.Tensor]:
    """Nine modules in a chain."""
    layers = [
        nn.Conv2d(3, 128, 3, 2, 1),
        nn.ReLU(),
        *(Branches(128) for _ in range(9)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(128, 10)), torch.randn(8, 3, 64, 64)


class Experts(nn.Module):
    """A mixture of 32 experts, all of which are used, between an encoder and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 512), nn.ReLU())
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 256 * (1 + i % 4)), nn.ReLU(), nn.Linear(256 * (1 + i % 4), 512))
            for i in range(32)
        )
        self.gate, self.head = nn.Linear(512, 32), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors (n, 256), scores (n, 10)."""
        h = self.encoder(x)
        weights = self.gate(h).softmax(1)
        mixed = [expert(h) * weights[:, i : i + 1] for i, expert in enumerate(self.experts)]
        return self.head(torch.stack(mixed).sum(0))


def experts() -> tuple[nn.Module, torch.Tensor]:
    """The mixture and a batch."""
    return Experts(), torch.randn(256, 256)


class Attention(nn.Module):
    """A block of a transformer whose 8 heads are operations of their own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width // heads) for _ in range(3)) for _ in range(heads)
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences (n, length, width), as many out."""
        h = self.norm(x)
        seen = [nn.functional.scaled_dot_product_attention(q(h), k(h), v(h), is_causal=True) for q, k, v in self.heads]
        x = x + self.out(torch.cat(seen, -1))
        return x + self.mlp(x)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Four blocks."""
    return nn.Sequential(*(Attention(256, 8) for _ in range(4))), torch.randn(4, 128, 256)


class UNet(nn.Module):
    """Three levels down and up; what goes past each level is read long after it was made."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64)
        self.down = nn.ModuleList(self.level(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.bottom, self.pool, self.up = self.level(64, 64), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.rise = nn.ModuleList(self.level(a, b) for a, b in ((128, 32), (64, 16), (32, 16)))
        self.head = nn.Conv2d(16, 1, 1)

    @staticmethod
    def level(before: int, after: int) -> nn.Sequential:
        """Two convolutions."""
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (n, 3, h, w), one channel out."""
        past = []
        for level in self.down:
            x = level(x)
            past.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for level in self.rise:
            x = level(torch.cat([self.up(x), past.pop()], 1))
        return self.head(x)


def unet() -> tuple[nn.Module, torch.Tensor]:
    """The model and a batch."""
    return UNet(), torch.randn(4, 3, 64, 64)


def problem_of(model: nn.Module, example: torch.Tensor) -> Problem:
    """The model's groups with times that follow from their operations, on unequal devices."""
    traced = trace(model, example)
    blocks, together = blocks_of(traced)
    arguments, _ = arguments_of(model, example)
    measured = measure(model, traced, blocks, arguments, repeats=1, busy_cores=0)
    groups = []
    for one in measured.groups:
        forward_s = max(LEAST_S, one.flops / FLOPS_PER_S)
        groups.append(replace(one, forward_s=forward_s, backward_s=2 * forward_s))
    tensors = tensors_of(traced, blocks, lambda node: node.num_bytes)
    draw = random.Random(0)
    devices = tuple(Device(draw.choice((1.0, 1.0, 2.0, 4.0))) for _ in range(DEVICES))
    return Problem(tuple(groups), tuple(tensors), devices, LINK, together=tuple(map(tuple, together)))


def hashed(problem: Problem) -> tuple[int, ...]:
    """A device for each group by chance."""
    draw = random.Random(1)
    by_class = {first: draw.randrange(len(problem.devices)) for first in problem.members}
    return tuple(by_class[first] for first in problem.class_of)


def makespans() -> list[str]:
    """The table of placements by orders."""
    lines = [
        "| architecture | groups | order | hash | finish-soonest | critical path | all on one | bound | hash, FIFO / best |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, make in (
        ("Inception, 9 modules", inception),
        ("32 experts", experts),
        ("transformer, 4 blocks of 8 heads", transformer),
    ):
        problem = problem_of(*make())
        placed = {"hash": hashed(problem)} | {
            k: PLACERS[k](problem) for k in ("finish-soonest", "critical-path", "all-on-one")
        }
        orders = {"FIFO": None, "longest remaining path": longest_remaining(problem)}
        took = {
            (p, o): simulate(problem, where, order).makespan_s
            for p, where in placed.items()
            for o, order in orders.items()
        }
        worst, best = took["hash", "FIFO"], min(took.values())
        for order in orders:
            cells = " | ".join(f"{took[p, order] * 1e3:.2f} ms" for p in placed)
            lines.append(
                f"| {name} | {len(problem.groups)} | {order} | {cells} | {bounds(problem).least_s * 1e3:.2f} ms"
                f" | {worst / best:.1f} |"
            )
    return lines


def bubbles() -> list[str]:
    """A chain of k stages with B micro-batches."""
    lines = ["| k | B | simulated | (k-1)/(B+k-1) |", "|---|---|---|---|"]
    for k, number in ((2, 1), (2, 8), (4, 4), (4, 16), (8, 32)):
        groups = tuple(Group(f"s{i}", forward_s=1e-3, backward_s=2e-3) for i in range(k))
        tensors = tuple(TensorInfo(f"s{i}", i, (i + 1,), 0) for i in range(k - 1))
        free = Link(latency_s=0.0, bytes_per_s=1e30, busy_s=0.0)
        run = simulate(
            Problem(groups, tensors, tuple(Device() for _ in range(k)), free, microbatches=number), tuple(range(k))
        )
        lines.append(f"| {k} | {number} | {run.bubble:.4f} | {(k - 1) / (number + k - 1):.4f} |")
    return lines


class Watched(Run):
    """Writes down when each device begins to use what has come to it.

    Args:
        problem: as of `Run`.
        is_queued: whether a transfer waits for those before it on its link.
    """

    def __init__(self, problem: Problem, *, is_queued: bool = True) -> None:
        super().__init__(problem, records=True)
        self.is_queued = is_queued
        self.sent: dict[tuple[str, str, int, int], list[float]] = {}
        self.used: dict[tuple[str, str, int, int], list[float]] = {}

    def _do(self, phase: str, device: int, microbatch: int, one: Operation) -> bool:
        done = super()._do(phase, device, microbatch, one)
        is_use = one.kind == ("receive" if phase == "forward" else "take")
        if done and is_use and one.transfer is not None:
            name = self.problem.tensors[one.transfer.tensor].node
            came_s = self.arrived[phase, microbatch, one.transfer, one.reader]
            where = one.transfer.to if phase == "forward" else one.transfer.source
            self.used.setdefault((phase, name, where, microbatch), []).append(self.free[device])
            self.sent.setdefault((phase, name, where, microbatch), []).append(came_s)
        return done

    def _send(self, phase: str, device: int, microbatch: int, transfer: Transfer, reader: int) -> None:
        if not self.is_queued:
            self.links.clear()
        super()._send(phase, device, microbatch, transfer, reader)


def peaks(problem: Problem, device_of: Sequence[int], order: Sequence[int]) -> tuple[int, int, int]:
    """Bytes of the device that holds most: as simulated; if no tensor, and if no gradient either, came before its use.

    What a group makes and reads is kept until its backward pass has ended, as autograd does; gradients are added up as they
    are taken.
    """
    watched = Watched(problem)
    run = watched.run(programs(problem, device_of, order))
    at = {(e.kind, e.name, e.microbatch): e for e in run.events if e.to < 0}
    tensors = {one.node: one for one in problem.tensors}
    changes: list[list[list[tuple[float, int]]]] = [[[] for _ in problem.devices] for _ in range(3)]

    def hold(device: int, num_bytes: int, begins: Sequence[float], end_s: float) -> None:
        for own, begin_s in zip(changes, begins, strict=True):
            own[device] += [(begin_s, num_bytes), (max(begin_s, end_s), -num_bytes)]

    for group, device in zip(problem.groups, device_of, strict=True):
        for m in range(problem.microbatches):
            begin_s = at["forward", group.name, m].start_s
            hold(device, group.saved_bytes, [begin_s] * 3, at["backward", group.name, m].end_s)
    for (phase, name, device, m), times in watched.used.items():
        tensor, came = tensors[name], watched.sent[phase, name, device, m]
        if phase == "forward":
            readers = [problem.groups[one].name for one in tensor.consumers if device_of[one] == device]
            end_s = max((at["backward", one, m].end_s for one in readers), default=times[0])
            hold(device, tensor.num_bytes, [came[0], times[0], times[0]], end_s)
            continue
        for came_s, used_s in zip(came, times, strict=True):  # each until it is added to the sum
            hold(device, tensor.num_bytes, [came_s, came_s, used_s], used_s)
        hold(device, tensor.num_bytes, [times[0]] * 3, at["backward", problem.groups[tensor.producer].name, m].start_s)
    found = [max(max(accumulate((b for _, b in sorted(own)), initial=0)) for own in kind) for kind in changes]
    return found[0], found[1], found[2]


def staged(problem: Problem) -> tuple[Sequence[int], Sequence[int]]:
    """A placement and its order."""
    device_of = PLACERS["critical-path" if problem.microbatches == 1 else "balanced"](problem)
    assert device_of is not None
    return device_of, longest_remaining(problem)


def unqueued(problem: Problem) -> tuple[float, float]:
    """A step's seconds, and how much shorter it were without queues, as a share."""
    device_of, order = staged(problem)
    step_s = simulate(problem, device_of, order).makespan_s
    return step_s, Watched(problem, is_queued=False).run(programs(problem, device_of, order)).makespan_s / step_s - 1


def lateness() -> list[str]:
    """What late receives, or fewer tensors under way, could gain at most."""
    lines = [
        "| architecture | devices | micro-batches | step | no queues | at 125 MB/s | most memory | late tensors"
        " | late gradients, too |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, make in (("Inception", inception), ("experts", experts), ("transformer", transformer), ("U-Net", unet)):
        fifty = problem_of(*make())
        for num, number in ((2, 1), (8, 1), (2, 8), (4, 8)):
            devices = tuple(Device(1.0 + device % 2) for device in range(num))
            problem = replace(fifty, devices=devices, microbatches=number)
            device_of, order = staged(problem)
            held, tensors, both = peaks(problem, device_of, order)
            step_s, gain = unqueued(problem)
            slow = replace(problem, link=replace(LINK, bytes_per_s=LINK.bytes_per_s / 10))
            lines.append(
                f"| {name} | {num} | {number} | {step_s * 1e3:.1f} ms | {gain:+.1%} | {unqueued(slow)[1]:+.1%}"
                f" | {held / 1e6:.1f} MB | {tensors / held - 1:+.1%} | {both / held - 1:+.1%} |"
            )
    return lines


def planning() -> list[str]:
    """Processor time of all placers on random graphs."""
    lines = ["| groups | devices | processor time, median of 3 |", "|---|---|---|"]
    for num, devices in ((50, 8), (500, 8)):
        draw = random.Random(0)
        groups = tuple(
            Group(f"g{i}", forward_s=draw.uniform(1, 4) * 1e-3, backward_s=draw.uniform(2, 8) * 1e-3)
            for i in range(num)
        )
        readers = [tuple(r for r in range(i + 1, num) if draw.random() < 3 / num) for i in range(num)]
        tensors = tuple(TensorInfo(f"g{i}", i, one, 10**5) for i, one in enumerate(readers) if one)
        problem = Problem(groups, tensors, tuple(Device(draw.choice((1.0, 2.0))) for _ in range(devices)))
        times = []
        for _ in range(3):
            begun_s = time.process_time()
            candidates(problem)
            times.append(time.process_time() - begun_s)
        lines.append(f"| {num} | {devices} | {statistics.median(times):.2f} s |")
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    show(
        [
            "# Placements, simulated",
            "",
            "Command: `python benchmarks/fidelity/placement.py`. Groups take what their floating-point operations take at 20",
            f"GFLOP/s; {DEVICES} devices, half of them of speed 1, others 2 or 4 times slower; links of 1.25 GB/s and 50 us.",
            "",
            "Mayer et al. (2017) find up to 4 times between hash placement with FIFO order and the best of their strategies,",
            "on graphs of their own; the last column is that ratio here. The bound is what no placement can fall below.",
            "",
            *makespans(),
            "",
            "## The bubble of a chain with micro-batches",
            "",
            *bubbles(),
            "",
            "## Receives as late as possible",
            "",
            "A tensor is sent as soon as it is made, and waits at the other device until it is used. The columns say what",
            "any other rule could gain at most: in time, if no transfer waited for another on its link (no queues), on",
            "links as above and on such of 125 MB/s; in memory of the device that holds most, if tensors (late tensors),",
            "and gradients, too, came in the moment in which they are used. Every second device is 2 times slower; one",
            "micro-batch is placed by the critical path, several in balanced stages. Memory gains next to nothing:",
            "autograd keeps what a group has read until its backward pass, so that the device holds it at the end of the",
            "forward pass, however late it came. Time gains little on links of one machine, which are all that a placed",
            "run has; on slow ones, what no queue can do is not what a better order can do, as the bytes still have to",
            "pass.",
            "",
            *lateness(),
            "",
            "## Planning",
            "",
            *planning(),
        ],
        __file__,
    )
