"""What methods with local steps train when workers die, in one process and a class of its own: a slow reference."""

import copy
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from processes.survivors import OPTIMIZERS, model, samples


@dataclass(frozen=True)
class Method:
    """When models are averaged, and how means are merged: by `local_weight`, and an outer step of `rate` and `momentum`."""

    spec: str
    period: int
    delay: int = 0
    local_weight: float = 0.0
    fragments: int = 1
    rate: float = 0.0
    momentum: float = 0.0
    warmup: int = 0


LOCAL = Method("local-sgd(period=3)", 3)
EACH = Method("local-sgd(period=1)", 1)
LONG = Method("local-sgd(period=5)", 5)  # an epoch has four rounds
LONGEST = Method("local-sgd(period=50)", 50)
WARM = Method("local-sgd(period=3, warmup_steps=4)", 3, warmup=4)
LATE = Method("da-sgd(period=3, delay=2, local_weight=0.25, compensate=false)", 3, 2, 0.25)
WHOLE = Method("da-sgd(period=3, delay=3, local_weight=0.5, compensate=false)", 3, 3, 0.5)
LATEST = Method("da-sgd(period=9, delay=7, local_weight=0.5, compensate=false)", 9, 7, 0.5)  # longer than an epoch
OUTER = Method("diloco(period=3)", 3, rate=0.7, momentum=0.9)
PLAIN = Method("diloco(period=2, outer=sgd(rate=0.9))", 2, rate=0.9)
PARTS = Method("diloco(period=4, fragments=2, outer=nesterov(rate=0.5))", 4, fragments=2, rate=0.5, momentum=0.9)
STREAM = Method(
    "diloco(period=4, fragments=2, delay=1, local_weight=0.5)", 4, 1, 0.5, fragments=2, rate=0.7, momentum=0.9
)
METHODS = [LOCAL, EACH, LONG, LONGEST, WARM, LATE, WHOLE, LATEST, OUTER, PLAIN, PARTS, STREAM]


def coded(method):
    """The same, with messages that pass through a codec that loses nothing."""
    return replace(method, spec=f"{method.spec[:-1]}, codec=exact(feedback=true))")


@dataclass
class Fragment:
    """Some of the model's parameters, by their places; the outer parameters, and their momentum."""

    places: list
    anchor: list
    momentum: list


def steps_of(folder, workers):
    """By worker: each step's batches, as lists of samples; a worker without a batch has none."""
    paths = [folder / f"steps-{worker}.jsonl" for worker in range(workers)]
    lines = [path.read_text().splitlines() if path.exists() else [] for path in paths]
    return [[[batch if is_own else [] for batch, is_own in json.loads(one)[1][1]] for one in own] for own in lines]


def lives_of(program, workers, ended=()):
    """By worker: its steps as `steps_of`, where they belong in the run, and the first and the last step of each of its lives.

    Args:
        program: the `Survivors` loop.
        workers: how many.
        ended: those whose last process was killed, too.
    """
    steps, lives = [], {}
    for worker in range(workers):
        path = program.folder / f"steps-{worker}.jsonl"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
        made = {k: [batch if is_own else [] for batch, is_own in step] for k, (_, step) in lines}
        begins, newest = [1, *program.entered(worker).values()], max(made, default=0)
        ends = [max((k for k in made if k < begin), default=0) for begin in begins[1:]]
        steps.append([made.get(k, []) for k in range(1, 1 + newest)])
        lives[worker] = list(zip(begins, [*ends, newest if worker in ended else math.inf], strict=True))
    return steps, lives


@dataclass(frozen=True)
class Training:
    """Makes a model, and an optimizer for its parameters; loads a batch's inputs and targets; the loss of a batch."""

    make: Any
    optimizer: Any
    data: Any
    loss: Any = nn.functional.mse_loss
    clips: bool = False

    @classmethod
    def of(cls, program):
        """A `Survivors` loop's."""
        _, x, y = samples(program.num_batches)
        data = lambda batch: (x[batch], y[batch])  # noqa: E731
        return cls(lambda: model(program.net), OPTIMIZERS[program.optimizer], data, clips=program.clips)


def steps_in(records):
    """The same of records: each step's batch, as its number."""
    numbers = [
        zip(rows["batch"].tolist(), rows["samples"].tolist(), strict=True) for _, rows in sorted(records.items())
    ]
    return [[[[batch] if samples else []] for batch, samples in own] for own in numbers]


class LocalReference:
    """Replays the workers' steps: all make a step, then averages that are due are taken over those that are still there.

    Args:
        method: what the run did.
        training: what each worker's steps do.
        steps: by worker: its steps, each as a list of batches, which are lists; a worker without a batch has an empty one.
        last: of each dead worker, the last step after which it took part in an average that was due.
        resumed: after so many steps all dead workers have successors, with what the first survivor had; None: never.
        lives: by worker, the first and last steps of it and its successors, if they are not as `last` and `resumed` say.
    """

    def __init__(self, method, training, steps, last, resumed=None, lives=None):
        self.method, self.training = method, training
        self.steps = steps
        self.lives = {worker: [(1, last.get(worker, math.inf))] for worker in range(len(steps))} | (lives or {})
        for worker in last if resumed is not None else ():  # a successor's file goes on from that of the dead one
            own = self.steps[worker]
            made = len(own) - (max(map(len, self.steps)) - resumed)
            self.steps[worker] = (
                own[: min(made, last[worker])] + [[]] * (resumed - min(made, last[worker])) + own[made:]
            )
            self.lives[worker].append((resumed + 1, math.inf))
        self.models = [training.make() for _ in self.steps]
        self.optimizers = [training.optimizer(one.parameters()) for one in self.models]
        self.fragments = [Fragment(places, *self._outer(places)) for places in self._cut()]
        self.met = [0] * len(self.fragments)  # the steps in each fragment's last mean
        self.counted = Counter()  # the batches that are in the means of all fragments

    def _cut(self):
        sizes = [one.numel() for one in self.models[0].parameters()]
        found = [[] for _ in range(self.method.fragments)]
        for place in sorted(range(len(sizes)), key=lambda one: (-sizes[one], one)):
            min(found, key=lambda own: sum(sizes[one] for one in own)).append(place)
        return found

    def _outer(self, places):
        own = list(self.models[0].parameters())
        anchor = [own[place].detach().clone() for place in places]
        return anchor, [torch.zeros_like(one) for one in anchor]

    def members(self, k):
        return [worker for worker, lives in self.lives.items() if any(first <= k <= last for first, last in lives)]

    def _succeed(self, k, flights):
        """Before step `k`, successors get what the first of the others has, also of the averages under way."""
        new = [worker for worker, lives in self.lives.items() if k in [first for first, _ in lives[1:]]]
        for worker in new:
            # The first one that has begun the step gives its state, and may then die in the step.
            begun = [one for one, lives in self.lives.items() if any(begin <= k <= end + 1 for begin, end in lives)]
            first = next(one for one in begun if one not in new)
            self.models[worker] = copy.deepcopy(self.models[first])
            self.optimizers[worker] = self.training.optimizer(self.models[worker].parameters())
            self.optimizers[worker].load_state_dict(copy.deepcopy(self.optimizers[first].state_dict()))
            for *_, sent in flights:
                sent[worker] = sent[first]

    def train(self):
        """Returns the mean of the survivors' models."""
        flights, k = [], 0
        for k in range(1, 1 + max(map(len, self.steps))):
            self._succeed(k, flights)
            if k <= self.method.warmup:
                self._step_together(k)
                continue
            for worker, steps in enumerate(self.steps):
                if k <= len(steps) and any(steps[k - 1]):
                    self._step(worker, steps[k - 1])
            for _, index, sent in [one for one in flights if one[0] == k]:
                self._merge(index, sent, k, k - self.method.delay)
            flights = [one for one in flights if one[0] > k]
            for index in range(len(self.fragments)):
                if (k - index * self.method.period // len(self.fragments)) % self.method.period == 0:
                    sent = [self._part(worker, index) for worker in range(len(self.steps))]
                    if self.method.delay:
                        flights.append((k + self.method.delay, index, sent))
                    else:
                        self._merge(index, sent, k, k)
        alive = self.members(math.inf)
        self._count(alive, math.inf, min(self.met), max(map(len, self.steps)))
        mean = copy.deepcopy(self.models[0])
        with torch.no_grad():
            for one, *own in zip(
                mean.parameters(), *(self.models[worker].parameters() for worker in alive), strict=True
            ):
                one.copy_(sum(own) / len(own))
        return dict(mean.named_parameters())

    def _step(self, worker, batches):
        self.optimizers[worker].zero_grad()
        for x, y in map(self.training.data, filter(None, batches)):
            self.training.loss(self.models[worker](x), y).backward()
        self._clip(worker)
        self.optimizers[worker].step()

    def _step_together(self, k):
        members = [one for one in self.members(k) if k <= len(self.steps[one])]
        self._count(members, k, k - 1, k)
        self.met = [k] * len(self.fragments)
        found = [
            self._gradient(worker, self.steps[worker][k - 1]) for worker in members if any(self.steps[worker][k - 1])
        ]
        total = sum(size for size, _ in found)
        for worker in members if total else ():
            for n, one in enumerate(self.models[worker].parameters()):
                one.grad = sum(gradient[n] * (size / total) for size, gradient in found)
            self.optimizers[worker].step()

    def _gradient(self, worker, batches):
        """The number of samples, and the gradient of their mean loss, clipped."""
        data = list(map(self.training.data, filter(None, batches)))
        size = sum(len(y) for _, y in data)
        self.optimizers[worker].zero_grad()
        for x, y in data:
            (self.training.loss(self.models[worker](x), y) * (len(y) / size)).backward()
        self._clip(worker)
        return size, [one.grad.clone() for one in self.models[worker].parameters()]

    def _clip(self, worker):
        if self.training.clips:
            nn.utils.clip_grad_norm_(self.models[worker].parameters(), 0.05)

    def _part(self, worker, index):
        own = list(self.models[worker].parameters())
        return [own[place].detach().clone() for place in self.fragments[index].places]

    @torch.no_grad()
    def _merge(self, index, sent, k, until):
        members, fragment, before = self.members(k), self.fragments[index], min(self.met)
        self.met[index] = until
        self._count(members, k, before, min(self.met))
        for n, place in enumerate(fragment.places):
            mean = sum(sent[worker][n] for worker in members) / len(members)
            if self.method.rate:
                change = fragment.anchor[n] - mean
                fragment.momentum[n] = change + self.method.momentum * fragment.momentum[n]
                step = change + self.method.momentum * fragment.momentum[n]
                mean = fragment.anchor[n] = fragment.anchor[n] - self.method.rate * step
            for worker in members:
                own = list(self.models[worker].parameters())[place]
                own.copy_(self.method.local_weight * own + (1 - self.method.local_weight) * mean)

    def _count(self, members, k, after, until):
        """Counts the members' steps after the one and until the other, but not those of a member's predecessors."""
        for worker in members:
            (first,) = (first for first, last in self.lives[worker] if first <= k <= last)
            for step in self.steps[worker][max(after, first - 1) : until]:
                self.counted.update(n for batch in step for n in batch)
