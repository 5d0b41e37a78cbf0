"""A shard's memory in which each update leaves a mark.

A gradient says whose it is and which, and a shard's elements say which update of each worker it made last. So what a worker
reads tells, shard by shard, which updates are in it.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch

from paceline.algorithms.server.apply import Applier, ApplyRule
from paceline.algorithms.server.modes import Mode
from paceline.memory.served import COUNTED

_PREFIX = "gathered."  # what a snapshot has of a gathering
ROOM = 16  # elements of a shard: for each worker its last update's number, and its incarnation + 1; how often it was replaced
MOST = ROOM // 2 - 1
SERVERS = ROOM - 1


@dataclass(frozen=True, kw_only=True)
class Marks(ApplyRule):
    """Notes whose updates have been made; a gradient is a mean over the workers that it names."""

    def start(self, num_elements, dtype):
        return Marking()


class Marking(Applier):
    def apply(self, x, gradient, info, learning_rate):
        made = (gradient != 0).nonzero().flatten()
        x[made] = gradient[made] * (len(made) // 2)


@dataclass(frozen=True, kw_only=True)
class Watched(Mode):
    """A mode that notes at which clocks workers are let in."""

    mode: Mode
    world: Any

    @property
    def chosen_once(self):
        return self.mode.chosen_once

    @property
    def waits(self):
        return self.mode.waits

    def admission(self, shard_id, num_workers):
        admission = self.mode.admission(shard_id, num_workers)
        join = admission.join

        def watched(worker_id, sequence=0):
            join(worker_id, sequence)
            self.world.let_in[shard_id, worker_id] = admission.clock(worker_id)

        admission.join = watched
        return admission

    def gathering(self, num_workers):
        return Marked(self.mode.gathering(num_workers))


class Marked:
    """Gradients gathered as a mode does; an update is then the mean of what is new of each worker, which marks name."""

    chosen, takes_rows = None, False

    def __init__(self, gathering):
        self.within, self.new = gathering, {}
        self.join, self.moves = gathering.join, 0.0

    def state(self):
        return {**self.within.state(), **{f"{_PREFIX}new.{worker}": one for worker, one in self.new.items()}}

    def load(self, state, dtype):
        self.within.load(state, dtype)
        begin = f"{_PREFIX}new."
        self.new = {int(name.removeprefix(begin)): one for name, one in state.items() if name.startswith(begin)}
        self.chosen = None

    def take(self, one):
        self.new[one.update.worker_id] = one.gradient.clone()
        return self._marked(self.within.take(one))

    def leave(self, worker_id):
        return self._marked(self.within.leave(worker_id))

    def _marked(self, due):
        if due is None:
            return None
        new, self.new = list(self.new.values()), {}
        return due._replace(gradient=sum(new) / len(new))


@dataclass
class Update:
    """What one worker's update became at one shard."""

    worker: int
    incarnation: int
    number: int
    version: int
    late: bool  # it is not numbered after the clock at which its worker was let in: that had been taken for dead
    server: int  # the shard's so-manieth
    undone: float = math.inf  # the server that begins without it


@dataclass
class Read:
    """What a worker computed a gradient at; its clock is one below the number of the update that followed."""

    worker: int
    incarnation: int
    x: torch.Tensor
    clock: int = -1

    def last(self, shard, worker):
        """Incarnation and number of the newest update of a worker in what came from a shard."""
        part = self.part(shard)
        return int(part[MOST + worker]) - 1, int(part[worker])

    def part(self, shard):
        return self.x[ROOM * shard : ROOM * (shard + 1)]


class Memory:
    """A shard's vector and words, which outlive its servers."""

    def __init__(self, world, shard):
        self.world, self.shard, self.ranges = world, shard, world.ranges
        self.x, self.version, self.named = torch.zeros(ROOM, dtype=torch.float64), 0, None
        self.counted = dict.fromkeys(COUNTED, 0)
        self.before, self.is_writing = self.x.clone(), False

    @contextlib.contextmanager
    def writing(self, part):
        self.is_writing = True
        yield
        self.is_writing = False

    def advance(self):
        self.version += 1
        if not self.is_writing:  # a step without an update
            return self.version
        changed = self.x != self.before
        made = changed[:MOST] | changed[MOST : 2 * MOST]
        assert made.any(), "an update was made twice"
        for worker in made.nonzero().flatten().tolist():
            own = (int(self.x[MOST + worker]) - 1, int(self.x[worker]))
            late = own[1] <= self.world.let_in.get((self.shard, worker), 0)
            self.world.updates[self.shard].append(Update(worker, *own, self.version, late, int(self.x[SERVERS])))
        self.before = self.x.clone()
        return self.version

    def restore(self, x, version=None):
        """What a successor begins with; None: a snapshot's, whose version is not counted on from."""
        kept = self.world.snapshots[self.shard]["version"] if version is None else version
        server = self.x[SERVERS] + 1
        self.x.copy_(x)
        self.x[SERVERS] = server
        self.before = self.x.clone()
        self.version = self.version if version is None else version
        for one in self.world.updates[self.shard]:
            if one.version > kept:
                one.undone = min(one.undone, int(server))

    def count(self, what, number=1):
        self.counted[what] += number

    def choose(self, number):
        self.chosen = number

    def name_copy(self, incarnation):
        self.named = incarnation


class Storage:
    """Snapshots at random updates; the first at once."""

    def __init__(self, world, shard):
        self.world, self.shard = world, shard

    def restore(self):
        return self.world.snapshots.get(self.shard)

    def keep(self, state, version):
        if self.shard not in self.world.snapshots or self.world.draw.random() < 0.1:
            self.world.snapshots[self.shard] = state()

    def checkpoint(self, state, number):
        pass
