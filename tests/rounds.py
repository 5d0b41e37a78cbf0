"""A small problem whose epochs may be uneven: as a loop, as a task, and what plain PyTorch makes of it."""

import copy
import threading

import torch
from torch import nn

import paceline as pl
from contracts.runs import run_function
from paceline.batches import BatchPlan
from paceline.flat import FlatBinding
from paceline.simulation import _Simulation
from paceline.simulator import Cluster
from paceline.tasks import Task, load_task
from paceline.topology import Ring, metropolis_weights
from paceline.training import _Training

EPOCHS = 2
SHARED_MODEL = ["lockstep", "all-reduce", "all-reduce(sharded=true)"]
OWN_MODELS = ["d-psgd", "local-sgd(period=2)", "local-sgd(period=3, warmup_steps=2)"]
PERIODS = {"local-sgd(period=2)": 2, "local-sgd(period=3, warmup_steps=2)": 3}
WARM_UPS = {"local-sgd(period=3, warmup_steps=2)": 2}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.2),
}
SPECS = {  # the same for `TrainConfig`
    "sgd": {"optimizer": "sgd", "learning_rate": 0.5},
    "momentum": {"optimizer": "sgd(weight_decay=0.1)", "learning_rate": 0.1, "momentum": 0.9},
    "adamw": {"optimizer": "adamw(weight_decay=0.2)", "learning_rate": 0.05},
}


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


def backward(model, some, loss=nn.functional.cross_entropy):
    """One backward pass over some batches as one."""
    x, y = (torch.cat(tensors) for tensors in zip(*some, strict=True))
    loss(model(x), y).backward()


def reference(algorithm, optimizer, epochs, workers, make=made):
    """The run's model at the end; where all have one model, they step with a round's batches as one.

    `epochs` are lists of batches, dealt in rounds.
    """
    models = [make() for _ in range(workers)]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    rounds = [batches[r : r + workers] for batches in epochs for r in range(0, len(batches), workers)]
    for k, batches in enumerate(rounds):
        together = algorithm in SHARED_MODEL or k < WARM_UPS.get(algorithm, 0)
        before = [copy.deepcopy(model) for model in models]
        for i, (model, stepper) in enumerate(zip(models, optimizers, strict=True)):
            stepper.zero_grad()
            if together or i < len(batches):
                backward(model, batches if together else batches[i : i + 1])
            if algorithm == "d-psgd":
                mix(model, [(weight, before[j]) for j, weight in metropolis_weights(Ring(), i, workers, k).items()])
            stepper.step()  # leaves parameters out that have no gradient
        if algorithm in PERIODS and not together and (k + 1) % PERIODS[algorithm] == 0:
            after = [copy.deepcopy(model) for model in models]
            for model in models:
                mix(model, [(1 / workers, other) for other in after])
    mean = make()
    mix(mean, [(1 / workers, model) for model in models])
    return [p.detach() for p in mean.parameters()]


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


def run_loop(algorithm, loop, workers, backend):
    """The run, and the models at its end: of every worker, or where each has its own, their mean."""
    if backend == "simulator":
        return pl.simulate(loop, workers=workers, algorithm=algorithm), list(loop.models.values())
    run, parameters = run_function(loop, workers=workers, algorithm=algorithm, backend=backend)
    if algorithm in SHARED_MODEL:
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


def shuffled(num_batches):
    """The task's epochs."""
    x, y = samples(num_batches)
    plan = BatchPlan(num_samples=len(x), batch_size=2)
    numbers = [range(epoch * num_batches, (epoch + 1) * num_batches) for epoch in range(EPOCHS)]
    return [[(x[plan.indices(k)], y[plan.indices(k)]) for k in epoch] for epoch in numbers]


def run_task(algorithm, optimizer, name, workers, backend, **settings):
    """The run of a task, and its model at the end."""
    config = pl.TrainConfig(
        task=name, algorithm=algorithm, workers=workers, epochs=EPOCHS, **SPECS[optimizer], **settings
    )
    if backend == "simulator":
        simulation = _Simulation(config, Cluster(workers=workers), False, None)
        run, binding = simulation.run(), simulation.binding
        x = torch.empty(binding.num_elements)
        simulation.machine.shared.snapshot(x)
        return run, binding.views(x)
    training = _Training(pl.TrainConfig(**{**vars(config), "backend": backend}), None, None, "", None)
    run = training.run()
    return run, FlatBinding(load_task(name).model().parameters()).views(training.supervisor.parameters(0).x)
