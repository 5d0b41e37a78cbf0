"""A small VGG trained by N threads in groups, and by one; averages are made here, as plainly as can be."""

import copy
import threading

import torch
import torch.nn.functional as F
from torch import nn

from paceline.memory.axes import Axes, plan_axes
from paceline.memory.collectives import SharedMemoryCollectives
from paceline.memory.segment import Layout, Segment
from paceline.model_parallel.counted import Counted, Traffic
from paceline.model_parallel.hybrid.cut_model import CutModel
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.model_parallel.hybrid.mesh import Axis, Mesh
from paceline.model_parallel.hybrid.plan import plan_cuts
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


def meshes(num_workers, groups, capacity=None, timeout_s=60.0):
    """Every worker's place, on shared memory."""
    capacity = capacity or CAPACITY
    layout = Layout()
    everybody = SharedMemoryCollectives.reserve(layout, capacity, num_workers, dtype=torch.float64)
    parts = num_workers // groups
    shapes = {"group": AxisShape(parts), REPLICAS: AxisShape(groups, parts)}
    plan = plan_axes(layout, num_workers, shapes, capacity, torch.float64)
    segment = Segment.create(layout.size_bytes)
    return [_mesh(segment, everybody, plan, worker, parts, capacity, timeout_s) for worker in range(num_workers)]


def _mesh(segment, everybody, plan, worker, parts, capacity, timeout_s):
    along, traffic, n = Axes(segment, plan, worker, timeout_s=timeout_s).along, Traffic(), plan.num_workers
    group = Counted(along["group"], "group", parts, worker % parts, traffic, None) if "group" in along else None
    across = (
        Counted(along[REPLICAS], "replicas", n // parts, worker // parts, traffic, None) if REPLICAS in along else None
    )
    all_ = SharedMemoryCollectives(segment, everybody, worker, timeout_s=timeout_s)
    all_ = Counted(all_, "all", n, worker, traffic, None)
    axis = Axis(group, worker % parts, parts, capacity)
    return Mesh(worker, n, n // parts, all_, axis, across, traffic)


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
    cut = CutModel(model, plan_cuts(model, HybridParallel(groups=1, min_weights=500), 1), 0, seed)
    optimizer, found, version = optimizer_of(cut.parameters), [], [0]
    cut.connect(Mesh.alone(), lambda: version[0])
    for inputs, targets in data:
        inputs = inputs.clone().requires_grad_()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        version[0] += 1
        found.append((loss.item(), inputs.grad))
    return model, optimizer, found


class Trained:
    """What N threads come to, with so many rows each of every batch."""

    def __init__(self, model, optimizer_of, data, shares, layout, seed=7):
        n = len(shares)
        self.plan = plan_cuts(model, layout, n)
        self.meshes = meshes(n, layout.groups)
        self.models = [copy.deepcopy(model) for _ in range(n)]
        self.optimizers, self.losses, self.inputs, self.norms = (
            [None] * n,
            [[] for _ in range(n)],
            [[] for _ in range(n)],
            [],
        )
        self.shapes = [None] * n
        arguments = optimizer_of, data, shares, seed
        together([lambda worker=worker: self._work(worker, *arguments) for worker in range(n)])

    def _work(self, worker, optimizer_of, data, shares, seed):
        model, mesh, total = self.models[worker], self.meshes[worker], sum(shares)
        cut = CutModel(model, self.plan, worker, seed)
        self.shapes[worker] = {name: tuple(one.shape) for name, one in model.named_parameters()}
        optimizer = self.optimizers[worker] = optimizer_of(cut.parameters)
        version = 0
        cut.connect(mesh, lambda: version)
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
                cut.empty_pass(inputs)
            for at, parameter in enumerate(cut.parameters):
                is_cut = at >= len(cut.parameters) - cut.num_cut
                weight = cut.samples_of_group(shares[worker]) if is_cut else shares[worker]
                gradient = parameter.grad.mul_(weight / total)
                across = mesh.replicas if is_cut else mesh.everybody
                if across is not None:
                    across.start_all_reduce(gradient.view(-1)).wait()
            norm = cut.norm([one.grad for one in cut.parameters])
            if worker == 0:
                self.norms.append(norm)
            optimizer.step()
            version += 1
        cut.make_state_whole(optimizer)
        cut.make_whole()
        cut.remove()
