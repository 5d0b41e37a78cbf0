"""A small problem whose epochs may be uneven: as a loop, as a task, and what plain PyTorch makes of it."""

import copy
import threading

import torch
from torch import nn

import paceline as pl
from contracts.runs import run_function
from paceline.algorithms.topology import Ring, metropolis_weights
from paceline.data.plan import BatchPlan
from paceline.optim.flat import FlatBinding
from paceline.optim.saved_state import state_for_checkpoints
from paceline.run.simulate_task import TaskSimulation
from paceline.run.train import prepared
from paceline.simulator import Cluster
from paceline.system.folder_lock import run_folder
from paceline.tasks import Task, load_task

EPOCHS = 2
SHARED_MODEL = ["lockstep", "all-reduce", "all-reduce(sharded=true)"]
OWN_MODELS = ["d-psgd", "local-sgd(period=2)", "local-sgd(period=3, warmup_steps=2)"]
PERIODS = {"local-sgd(period=2)": 2, "local-sgd(period=3, warmup_steps=2)": 3}
WARM_UPS = {"local-sgd(period=3, warmup_steps=2)": 2}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.2),
    "groups": lambda p: torch.optim.SGD(two_groups(p), lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
}
SPECS = {  # the same for `TrainConfig`
    "sgd": {"optimizer": "sgd", "learning_rate": 0.5},
    "momentum": {"optimizer": "sgd(weight_decay=0.1)", "learning_rate": 0.1, "momentum": 0.9},
    "adamw": {"optimizer": "adamw(weight_decay=0.2)", "learning_rate": 0.05},
}


def two_groups(parameters):
    """Vectors and matrices apart."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() == 2], "nesterov": True, "dampening": 0.0},
    ]


def made():
    """The model, always with the same parameters."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def samples(num_batches):
    """All but the last batch, of one sample, have two."""
    generator = torch.Generator().manual_seed(num_batches)
    n = 2 * num_batches - 1
    return torch.randn(n, 3, generator=generator), torch.randint(0, 2, (n,), generator=generator)


def in_order(num_batches):
    """The batches of an epoch as a list."""
    x, y = samples(num_batches)
    return [(x[k : k + 2], y[k : k + 2]) for k in range(0, len(x), 2)]


class Mixture(nn.Module):
    """Experts of which a batch uses one, by its first number; and parameters that no batch ever uses."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(16))
        self.experts = nn.ModuleList(nn.Linear(3, 4) for _ in range(3))
        self.rare = nn.Parameter(torch.zeros(4))
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        which = int(x[0, 0].abs() * 10) % 5
        h = self.experts[min(which, 2)](x).tanh()
        return self.last(h + self.rare if which == 4 else h)


def mixture():
    """Always with the same parameters; what is never used is 1."""
    model = Mixture()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if name.startswith(("unused", "never")):
                parameter.fill_(1.0)
    return model


def backward(model, some):
    """Adds the gradient of some batches as one: each by itself, as a model may take another way through each."""
    total = sum(len(y) for _, y in some)
    for x, y in some:
        (nn.functional.cross_entropy(model(x), y) * (len(y) / total)).backward()


def reference(algorithm, optimizer, epochs, workers, make=made, order="clear", late=0):
    """The run's model at the end, and every worker's optimizer's state; where all have one model, a round's batches are one.

    `epochs` are lists of batches, dealt in rounds. With `late`, gradients wait so many steps.
    """
    waiting = []
    models = [make() for _ in range(workers)]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    rounds = [batches[r : r + workers] for batches in epochs for r in range(0, len(batches), workers)]
    for k, batches in enumerate(rounds):
        together = algorithm not in OWN_MODELS or k < WARM_UPS.get(algorithm, 0)
        before = [copy.deepcopy(model) for model in models]
        for i, (model, stepper) in enumerate(zip(models, optimizers, strict=True)):
            stepper.zero_grad(set_to_none=not order.endswith("zero"))
            if together or i < len(batches):
                backward(model, batches if together else batches[i : i + 1])
            if algorithm == "d-psgd":  # averages first
                mix(model, [(weight, before[j]) for j, weight in metropolis_weights(Ring(), i, workers, k).items()])
            if late:
                waiting.append([p.grad for p in model.parameters()])
                due = waiting.pop(0) if len(waiting) > late else [None for _ in waiting[0]]
                for parameter, gradient in zip(model.parameters(), due, strict=True):
                    parameter.grad = gradient
            if i < len(batches) or together or not order.endswith("zero"):  # zeros are gradients, too
                stepper.step()  # leaves parameters out that have no gradient
        if algorithm in PERIODS and not together and (k + 1) % PERIODS[algorithm] == 0:
            after = [copy.deepcopy(model) for model in models]
            for model in models:
                mix(model, [(1 / workers, other) for other in after])
    mean = make()
    mix(mean, [(1 / workers, model) for model in models])
    return [p.detach() for p in mean.parameters()], [one.state_dict()["state"] for one in optimizers]


@torch.no_grad()
def mix(model, weighted):
    """`model` becomes the sum of weight times other."""
    for parameter, *others in zip(model.parameters(), *(other.parameters() for _, other in weighted), strict=True):
        parameter.copy_(sum(weight * p for (weight, _), p in zip(weighted, others, strict=True)))


class Loop:
    """The user's loop over `in_order`; `models` are those that its workers end with."""

    def __init__(self, optimizer, num_batches, order, make=made):
        self.optimizer, self.num_batches, self.order, self.make = optimizer, num_batches, order, make
        self.models, self.states, self.lock = {}, {}, threading.Lock()

    def __call__(self):
        model = self.make()
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        with pl.attach(model, optimizer) as worker:
            for _ in range(EPOCHS):
                for x, y in worker.batches(in_order(self.num_batches)):
                    if self.order.startswith("clear"):
                        optimizer.zero_grad()
                    backward(model, [(x, y)])
                    optimizer.step()
                    if not self.order.startswith("clear"):
                        optimizer.zero_grad(set_to_none=self.order.endswith("clear"))
        with self.lock:
            self.models[worker.worker_id] = [p.detach().clone() for p in model.parameters()]
            self.states[worker.worker_id] = state_for_checkpoints(optimizer)["state"]


def run_loop(algorithm, loop, workers, backend):
    """The run, and the models at its end: of every worker, or where each has its own, their mean."""
    if backend == "simulator":
        run = pl.simulate(loop, workers=workers, algorithm=algorithm)
        if algorithm in SHARED_MODEL + OWN_MODELS:
            return run, list(loop.models.values())
        # Without rounds a worker has seen the parameters as they were when its own loop ended.
        return run, [loop.models[max(run.records, key=lambda worker: run.records[worker]["ended_s"].max(initial=0.0))]]
    run, parameters = run_function(loop, workers=workers, algorithm=algorithm, backend=backend)
    if algorithm not in OWN_MODELS:
        return run, list(loop.models.values())
    # A worker has seen the mean as it was when its own loop ended; this is the last.
    return run, [FlatBinding(loop.make().parameters()).views(parameters.x)]


def task_file(folder, num_batches, make="made"):
    """The same as a task, whose batches of two are shuffled."""
    (folder / "tasks.py").write_text(f"import rounds\n\ndef task():\n    return rounds.task({num_batches}, {make!r})\n")
    return f"{folder}/tasks.py:task"


def task(num_batches, make):
    """What that file makes."""
    dataset = torch.utils.data.TensorDataset(*samples(num_batches))
    return Task(name="rounds", model=globals()[make], datasets=lambda _: (dataset, dataset), batch_size=2)


def shuffled(num_batches, epochs=EPOCHS):
    """The task's epochs."""
    x, y = samples(num_batches)
    plan = BatchPlan(num_samples=len(x), batch_size=2)
    numbers = [range(epoch * num_batches, (epoch + 1) * num_batches) for epoch in range(epochs)]
    return [[(x[plan.indices(k)], y[plan.indices(k)]) for k in epoch] for epoch in numbers]


def in_sequence(epochs):
    """Batches as workers take them that begin the next epoch without waiting for each other."""
    return [[batch for batches in epochs for batch in batches]]


def run_task(algorithm, optimizer, name, workers, backend, out=None, resume=None, **settings):
    """The run of a task, and its model at the end."""
    config = pl.TrainConfig(
        **{"task": name, "algorithm": algorithm, "workers": workers, "epochs": EPOCHS, **SPECS[optimizer], **settings}
    )
    if backend == "simulator":
        simulation = TaskSimulation(config, Cluster(workers=workers))
        run, binding = simulation.run(), simulation.binding
        x = torch.empty(binding.num_elements)
        simulation.machine.shared.snapshot(x)
        return run, binding.views(x)
    with run_folder(out, resume):
        training = prepared(pl.TrainConfig(**{**vars(config), "backend": backend}), out, resume)
        run = training.run()
    return run, FlatBinding(load_task(name).model().parameters()).views(training.supervisor.parameters(0).x)
