"""D-PSGD in which workers die, in one process: a slow reference, and what real and simulated workers note for it."""

import contextlib
import copy
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from oracles import gossip
from paceline.algorithms import d_psgd
from paceline.memory.views import SharedViews
from paceline.simulator.views import SimulatedViews
from paceline.transport.message_views import MessageViews
from processes.survivors import Survivors


def patched(views, note):
    """Calls `note` with a worker, what a program does (such as "begin") and numbers, as programs ask these `views`."""
    enter, begin, sent, model_of = views.enter, views.begin, views.sent, d_psgd._Neighbours.model_of
    meet = MessageViews._meet

    def worker_of(own):
        return own._scheduler.current.worker_id if views is SimulatedViews else own._worker_id

    def noted_enter(own, given):
        enter(own, given)
        note(worker_of(own), "enter")

    def noted_begin(own, round):
        members = begin(own, round)
        note(worker_of(own), "begin", round, list(members))
        return members

    def noted_sent(own, batches):
        sent(own, batches)
        note(worker_of(own), "sent", batches)

    def noted_meet(own, place=0):
        reports = meet(own, place)
        for worker, round in own._first_without.items():
            note(own._worker_id, "kept", worker, round, own._kept[worker])
        return reports

    def noted_model_of(own, j, k, x, place):
        found = model_of(own, j, k, x, place)
        if found is None:
            note(own._ports.worker_id, "missing", k, j)
        return found

    stack = contextlib.ExitStack()
    if views is MessageViews:
        stack.enter_context(mock.patch.object(views, "_meet", noted_meet))
    for owner, name, new in (
        (views, "enter", noted_enter),
        (views, "begin", noted_begin),
        (views, "sent", noted_sent),
        (d_psgd._Neighbours, "model_of", noted_model_of),
    ):
        stack.enter_context(mock.patch.object(owner, name, new))
    return stack


@dataclass(frozen=True)
class GossipSurvivors(Survivors):
    """The loop, whose worker notes its rounds in a file, as it asks these `views`."""

    views: Any = SharedViews

    def __call__(self):
        def note(worker, *what):
            with (self.folder / f"rounds-{worker}.jsonl").open("a") as file:
                file.write(json.dumps(what) + "\n")

        with patched(self.views, note):
            super().__call__()

    def repeats(self, workers):
        found = {}
        for worker in range(workers):
            path = self.folder / f"steps-{worker}.jsonl"
            for k, (_, step) in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
                found[worker, k - 1] = [batch for batch, is_own in step if not is_own]
        return found

    def notes(self, workers, dead=()):
        """Those of all workers.

        `dead`: workers of which a process has died. The others may not know of the last round that such a process began, and
        begin it with other members.
        """
        found = Notes()
        for worker in range(workers):
            path = self.folder / f"rounds-{worker}.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            begins = [number for number, what in enumerate(lines) if what[0] == "begin"]
            ends = [*(number for number, what in enumerate(lines) if what[0] == "enter"), len(lines)]
            begun_last = {max((one for one in begins if one < end), default=-1) for end in ends}
            for number, what in enumerate(lines):
                found.add(worker, *what, is_known=worker not in dead or number not in begun_last)
        return found


@dataclass
class Notes:
    """What workers have noted: each round's members, which models are missing, and how many steps of a worker others have.

    These are the steps that it has sent, or, where workers agree on what has come, `kept`. Of each replacement: the first
    round, and how many steps of its predecessor others have.
    """

    members: dict[int, list[int]] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    missing: set[tuple[int, int, int]] = field(default_factory=set)
    kept: dict[tuple[int, int], int] = field(default_factory=dict)  # by worker, and the first round without it
    came: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    entering: set[int] = field(default_factory=set)

    def add(self, worker, what, *numbers, is_known=True):
        match what:
            case "enter":
                self.entering.add(worker)
            case "begin":
                round, members = numbers
                if worker in self.entering:
                    self.entering.remove(worker)
                    self.came[worker].append((round, self.sent[worker]))
                if is_known:
                    assert self.members.setdefault(round, members) == members, "workers disagree on a round's members"
                self.begun[worker] = max(self.begun[worker], round + 1)
            case "sent":  # in the round that it has begun: a model with the steps before
                self.sent[worker] = self.begun[worker] - 1
            case "missing":
                self.missing.add((worker, *numbers))
            case "kept":
                other, round, steps = numbers
                assert self.kept.setdefault((other, round), steps) == steps, "workers disagree on a dead one's steps"

    def end(self, worker, first):
        """How many steps others have of the process that began with this round, and has died."""
        ends = [one for one in self.kept.items() if one[0][0] == worker and one[0][1] > first]
        came = [sent for round, sent in self.came[worker] if round > first]
        return min(ends)[1] if ends else [*came, self.sent[worker]][0]


@dataclass
class GossipReference:
    """Replays the workers' steps: all compute gradients, then average with their neighbours, then step.

    Args:
        training: what each worker's steps do.
        steps: by worker: its steps, each as a list of batches; a worker without a batch has an empty one. A replacement's
            are in the same list, after those of its predecessor and empty lists.
        notes: of the run.
        neighbours: of a worker, in the order of the members.
        repeats: by worker and step: batches that it had again; their gradients are added to one that counts.
    """

    training: Any
    steps: list
    notes: Notes
    neighbours: Any = gossip.ring
    repeats: dict[tuple[int, int], list] = field(default_factory=dict)

    def train(self, dead=()):
        """Returns the survivors' models; one of the `dead` may have made as many steps as they."""
        models = [self.training.make() for _ in self.steps]
        optimizers = [self.training.optimizer(one.parameters()) for one in models]
        last = max(map(len, self.steps))
        alive = [worker for worker, own in enumerate(self.steps) if len(own) == last and worker not in dead]
        for k in range(1 + self.notes.sent[alive[0]]):  # in a last round, without a step, where the loop accumulates
            members = self.notes.members[k]
            self._succeed(k, models, optimizers)
            W = gossip.metropolis(self.neighbours, len(members), k)
            before = [[p.detach().clone() for p in one.parameters()] for one in models]
            for place, i in enumerate(members):
                if k >= len(self.steps[i]) and i not in alive:
                    continue
                step = self.steps[i][k] if k < len(self.steps[i]) else []
                optimizers[i].zero_grad()
                for batch in [*filter(None, step), *self.repeats.get((i, k), ())] if any(step) else ():
                    x, y = self.training.data(batch)
                    self.training.loss(models[i](x), y).backward()
                if self.training.clips:
                    nn.utils.clip_grad_norm_(models[i].parameters(), 0.05)
                sources = [i if (i, k, j) in self.notes.missing else j for j in members]
                with torch.no_grad():
                    for n, p in enumerate(models[i].parameters()):
                        p.copy_(sum(W[place, m] * before[source][n] for m, source in enumerate(sources)))
                if any(step):
                    optimizers[i].step()
        return [models[one] for one in alive]

    def _succeed(self, k, models, optimizers):
        """Replacements whose first round this is get what the first of the others has."""
        new = [worker for worker, came in self.notes.came.items() if k in [round for round, _ in came]]
        first = next(one for one in self.notes.members[k] if one not in new)
        for worker in new:
            models[worker] = copy.deepcopy(models[first])
            optimizers[worker] = self.training.optimizer(models[worker].parameters())
            optimizers[worker].load_state_dict(copy.deepcopy(optimizers[first].state_dict()))

    def counted(self, dead):
        """How often each sample was trained on: of the dead, in the steps that others have."""
        found = Counter()
        for worker, own in enumerate(self.steps):
            begins = [0, *(round for round, _ in self.notes.came[worker])]
            for begin in begins:
                is_there = begin == begins[-1] and worker not in dead
                steps = own[begin : len(own) if is_there else self.notes.end(worker, begin)]
                found.update(n for step in steps for batch in step for n in batch)
        return found


def square(worker, workers, k):
    """A torus of two by two; three workers have none, and are a ring."""
    return {worker ^ 1, worker ^ 2} if workers == 4 else gossip.ring(worker, workers, k)


def mean_of(models):
    return [sum(own) / len(own) for own in zip(*(one.parameters() for one in models), strict=True)]
