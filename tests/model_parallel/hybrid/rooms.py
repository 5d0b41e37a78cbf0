"""A small VGG trained by N threads in groups, and by one; averages are made here, as plainly as can be."""

import copy
import math
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from model_parallel.tensor.threads import CountedAxis
from paceline.memory.axes import Axes, plan_axes
from paceline.memory.collectives import SharedMemoryCollectives
from paceline.memory.segment import Layout, Segment
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.model_parallel.hybrid.worker_part import WorkerPart
from paceline.model_parallel.tensor.traffic import Traffic
from paceline.optim.sharding import REPLICAS, AxisShape

STEPS = 3
CAPACITY = 4096  # elements of one operation: less than some have, so that these are cut into several


_building = threading.Lock()  # threads share PyTorch's generator


def small_vgg(dropout=0.5, *, inplace=True):
    with _building:
        torch.manual_seed(3)
        return _small_vgg(dropout, inplace)


def _small_vgg(dropout, inplace):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=inplace),
        nn.MaxPool2d(2),
        nn.Dropout(dropout / 2),
        nn.Flatten(),
        nn.Sequential(
            nn.Linear(64, 48),
            nn.ReLU(inplace=inplace),
            nn.Dropout(dropout),
            nn.Linear(48, 24),
            nn.ReLU(inplace=inplace),
            nn.Dropout(dropout),
            nn.Linear(24, 10),
        ),
    ).double()


def batches(rows, steps=STEPS):
    """Global batches: inputs and targets."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64),
            torch.randint(10, (rows,), generator=generator),
        )
        for _ in range(steps)
    ]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


@dataclass
class Ports:
    """What a part uses of a program's ports."""

    collectives: Any
    shared: Any = field(default_factory=lambda: SimpleNamespace(version=0))
    shards: Any = None


def carriers(num_workers, groups, timeout_s=60.0):
    """Every worker's collectives, on shared memory: along the axes, and of all workers."""
    layout = Layout()
    everybody = SharedMemoryCollectives.reserve(layout, CAPACITY, num_workers, dtype=torch.float64)
    parts = num_workers // groups
    shapes = {"group": AxisShape(parts), REPLICAS: AxisShape(groups, parts)}
    plan = plan_axes(layout, num_workers, shapes, CAPACITY, torch.float64)
    segment = Segment.create(layout.size_bytes)
    return [
        (
            Axes(segment, plan, worker, timeout_s=timeout_s).along,
            SharedMemoryCollectives(segment, everybody, worker, timeout_s=timeout_s),
        )
        for worker in range(num_workers)
    ]


def together(programs):
    """Runs each in a thread; raises the first error."""
    errors = []

    def run(program):
        try:
            program()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in programs]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise errors[0]


def alone(model, optimizer_of, data, seed=7):
    """Losses, input gradients of each step, by one worker with the whole batches."""
    model = copy.deepcopy(model)
    part = WorkerPart(HybridParallel(groups=1, min_weights=500), model, 0, 1, seed)
    ports = part.begin(Ports(None), {}, None)
    optimizer, found = optimizer_of(part.binding.parameters), []
    for inputs, targets in data:
        inputs = inputs.clone().requires_grad_()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        ports.shared.version += 1
        found.append((loss.item(), inputs.grad))
    return model, optimizer, found


class Trained:
    """What N threads come to, with so many rows each of every batch."""

    def __init__(self, model, optimizer_of, data, shares, layout, seed=7):
        n = len(shares)
        self.carriers = carriers(n, layout.groups)
        self.models = [copy.deepcopy(model) for _ in range(n)]
        self.optimizers, self.losses, self.inputs, self.norms = (
            [None] * n,
            [[] for _ in range(n)],
            [[] for _ in range(n)],
            [],
        )
        self.shapes, self.parts = [None] * n, [None] * n
        self.traffic = [defaultdict(Traffic) for _ in range(n)]
        arguments = optimizer_of, data, shares, layout, seed
        together([lambda worker=worker: self._work(worker, *arguments) for worker in range(n)])
        self.plan = self.parts[0].plan

    def _work(self, worker, optimizer_of, data, shares, layout, seed):
        model, total = self.models[worker], sum(shares)
        part = self.parts[worker] = WorkerPart(layout, model, worker, len(shares), seed)
        self.shapes[worker] = {name: tuple(one.shape) for name, one in model.named_parameters()}
        optimizer = self.optimizers[worker] = optimizer_of(part.binding.parameters)
        part.most_bytes = 8 * CAPACITY
        along, everybody = self.carriers[worker]
        ports = part.begin(Ports(everybody), along, None)
        part.along["group"] = CountedAxis("group", part.along["group"], self.traffic[worker])
        first = sum(shares[:worker])
        for inputs, targets in data:
            own = slice(first, first + shares[worker])
            x = inputs[own].clone().requires_grad_()
            optimizer.zero_grad()
            if shares[worker]:
                loss = F.cross_entropy(model(x), targets[own])
                loss.backward()
                self.losses[worker].append(loss.item() * shares[worker] / total)
                self.inputs[worker].append(x.grad * shares[worker] / total)
            else:
                part.without_batch(inputs)
            for parameter, offset in zip(part.binding.parameters, part.binding.offsets, strict=True):
                is_cut = offset >= part.binding.cut_from
                weight = ports.shards.samples(shares[worker]) if is_cut else shares[worker]
                gradient = parameter.grad.mul_(weight / total)
                across = ports.shards.collectives if is_cut else ports.collectives
                if across is not None:
                    across.start_all_reduce(gradient.view(-1)).wait()
            norm = part.clip(math.inf)
            if worker == 0:
                self.norms.append(norm)
            optimizer.step()
            ports.shared.version += 1
        part.make_state_whole(optimizer)
        part.make_whole()
        part.remove()
