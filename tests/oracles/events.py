"""What happened in a run: who computed which gradient when, what became of it, and what codecs made of it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from oracles.problem import PARTS, SIZE, clipped, gradient


class Coded(NamedTuple):
    """A vector (SIZE,) that was coded: what the codec was given, its memory included, and what its payload decodes to."""

    given: np.ndarray
    decoded: np.ndarray


class Half(NamedTuple):
    """What a worker makes of an exchange with another: of the model (SIZE,) that came from there, and that went from here."""

    peer: int
    there: np.ndarray
    here: np.ndarray


class Codec(NamedTuple):
    """What an oracle has to know of a codec: how exactly it computes, and whether what it does not send is kept for later."""

    tolerance: float
    remembers: bool


@dataclass
class Step:
    """One step of one worker.

    Args:
        worker: whose.
        number: of this worker's steps, from 1.
        passes: the samples of each backward pass since the last step.
        again: those of them, from 0, that have the batch of the pass before, as an epoch's last round has none for the worker:
            they weigh nothing.
        at: the parameters (SIZE,) that its loop saw in each of them.
        before: those that its optimizer stepped on, as it began; None where it did not step.
        read: the version of those parameters.
        ready: the newest version when the gradient was ready.
        applied: the version that the step made, -1 where its gradient was dropped, 0 where nothing was applied.
        overflows: whether the loop's loss is infinite here.
        ready_s: when the gradient was ready; all take alike long to a server, so that they come in this order.
    """

    worker: int
    number: int
    passes: list[list[int]] = field(default_factory=list)
    again: set[int] = field(default_factory=set)
    at: list[np.ndarray] = field(default_factory=list)
    before: np.ndarray | None = None
    read: int = 0
    ready: int = 0
    applied: int = 0
    overflows: bool = False
    ready_s: float = 0.0

    @property
    def samples(self):
        return sum(len(one) for k, one in enumerate(self.passes) if k not in self.again)

    def gradient(self, x=None, clip=None):
        """The sum of its passes' gradients at x, or where its loop saw them; clipped; and which parameters have one."""
        g, has = np.zeros(SIZE), np.zeros(len(PARTS), dtype=bool)
        if not self.samples:
            return g, has
        for samples, at in zip(self.passes, self.at if x is None else [x] * len(self.passes), strict=True):
            own, own_has = gradient(at, samples)
            g, has = g + own, has | own_has
        return clipped(g, clip), has


@dataclass
class Trace:
    """A run.

    Args:
        workers: how many began.
        steps: all of them, each worker's in their order.
        models: by worker, the parameters (SIZE,) that it ended with.
        sent: by worker, what it coded of its vectors, in their order; by the number of the mean they went into, where there
            are means.
        means: what was coded of each mean of all workers' vectors.
        left_s: by worker, when the others know that it has ended, or died.
        halves: by worker, of its exchanges, in their order.
        trips: worker and seconds of each round trip that a server has measured, in their order; None: the worker has left.
    """

    workers: int
    steps: list[Step]
    models: dict[int, np.ndarray]
    sent: dict[int, dict[int, Coded]] = field(default_factory=dict)
    means: list[Coded] = field(default_factory=list)
    left_s: dict[int, float] = field(default_factory=dict)
    halves: dict[int, list[Half]] = field(default_factory=dict)
    trips: list[tuple[int, float | None]] = field(default_factory=list)

    def making(self, version):
        """The steps whose gradients are in this update."""
        return [one for one in self.steps if one.applied == version]

    def of(self, worker):
        """A worker's steps."""
        return [one for one in self.steps if one.worker == worker]

    @property
    def versions(self):
        """Number of updates."""
        return max((one.applied for one in self.steps), default=0)


def close(found, wanted, tolerance, what):
    """Whether two vectors are equal to that tolerance, relative to the larger one's greatest element, or to 1."""
    scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
    off = float(np.abs(found - wanted).max(initial=0.0))
    assert off <= tolerance * scale, f"{what}: {off / scale:.3g} off"
