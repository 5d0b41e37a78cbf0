"""Plain loops for what late averages and outer optimizers come to, and the same problem as a user's loop; in float64."""

import copy
import threading

import torch
from torch import nn

import paceline as pl

RATE, MOMENTUM = 0.3, 0.5
DEALT = {
    1: [[0, 1, 2, 3]],
    2: [[0, 3], [1, 2]],
    4: [[0], [2], [1], [3]],
}  # by fragments: tensors of 12, 4, 8, 2 elements


def make_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def make_batches(number):
    generator = torch.Generator().manual_seed(number)
    return [
        (torch.randn(4, 3, generator=generator, dtype=torch.float64), torch.randint(0, 2, (4,), generator=generator))
        for _ in range(number)
    ]


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def local_steps(workers, num_batches, after_step):
    """Every worker's model, all of one beginning; after the t-th step of all, `after_step(t, parameters of each)`."""
    models = [make_model() for _ in range(workers)]
    optimizers = [make_optimizer(model) for model in models]
    batches = make_batches(num_batches)
    for t, first in enumerate(range(0, num_batches, workers), start=1):
        for model, optimizer, batch in zip(models, optimizers, batches[first : first + workers], strict=False):
            step(model, optimizer, batch)
        with torch.no_grad():
            after_step(t, [list(model.parameters()) for model in models])
    return mean_of([[p.detach() for p in model.parameters()] for model in models])


def mean_of(vectors):
    return [sum(parts) / len(parts) for parts in zip(*vectors, strict=True)]


def da_sgd(workers, num_batches, *, period, delay, local_weight, merge="paper"):
    flight = None

    def after_step(t, models):
        nonlocal flight
        if flight is not None and delay and t == flight[0] + delay:
            merge_into(models)
        if t % period == 0:
            flight = t, copy.deepcopy(models)
            if not delay:
                merge_into(models)

    def merge_into(models):
        mean = mean_of(flight[1])
        for x, snapshot in zip(models, flight[1], strict=True):
            for p, s, m in zip(x, snapshot, mean, strict=True):
                if merge == "paper":
                    p.copy_(local_weight * p + (1 - local_weight) * m)
                elif merge == "corrected":
                    p.copy_(p + (1 - local_weight) * (m - s))
                else:
                    p.copy_(m + p - s)

    return local_steps(workers, num_batches, after_step)


def diloco(workers, num_batches, *, period, rate, momentum=0.0, fragments=1, delay=0, local_weight=0.0):
    """Algorithm 2 of Streaming DiLoCo; the outer optimizers are PyTorch's."""
    outer = [nn.Parameter(p.detach().clone()) for p in make_model().parameters()]
    settings = {"lr": rate, "momentum": momentum, "nesterov": momentum > 0}
    optimizers = [torch.optim.SGD([outer[index] for index in own], **settings) for own in DEALT[fragments]]
    begins = [p * period // fragments for p in range(fragments)]
    sent = [None] * fragments

    def after_step(t, models):
        for p, own in enumerate(DEALT[fragments]):
            if t - delay > 0 and (t - begins[p] - delay) % period == 0 and delay:
                arrive(p, own, models)
        for p, own in enumerate(DEALT[fragments]):
            if (t - begins[p]) % period == 0:
                sent[p] = [mean_of([[outer[index] - x[index]] for x in models])[0].detach() for index in own]
                if not delay:
                    arrive(p, own, models)

    def arrive(p, own, models):
        for index, change in zip(own, sent[p], strict=True):
            outer[index].grad = change
        optimizers[p].step()
        for x in models:
            for index in own:
                x[index].copy_(local_weight * x[index] + (1 - local_weight) * outer[index])

    return local_steps(workers, num_batches, after_step)


class Loop:
    """The same problem as a user's loop; `models` are those that the workers end with."""

    def __init__(self, num_batches, epochs=1):
        self.num_batches, self.epochs = num_batches, epochs
        self.models, self.lock = {}, threading.Lock()

    def __call__(self):
        model = make_model()
        optimizer = make_optimizer(model)
        with pl.attach(model, optimizer) as worker:
            for _ in range(self.epochs):
                for batch in worker.batches(make_batches(self.num_batches)):
                    step(model, optimizer, batch)
        with self.lock:
            self.models[worker.worker_id] = [p.detach().clone() for p in model.parameters()]


def run_loop(algorithm, workers, num_batches, backend="simulator"):
    """The run, and the model that worker 0 ends with."""
    loop = Loop(num_batches)
    if backend == "simulator":
        run = pl.simulate(loop, workers=workers, algorithm=algorithm)
    else:
        run = pl.launch(loop, workers=workers, algorithm=algorithm, backend=backend)
    return run, loop.models[0]
