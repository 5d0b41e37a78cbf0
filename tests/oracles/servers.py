"""Parameter servers: gradients of versions that workers have read, admitted and applied by the server."""

import numpy as np

from oracles.events import close
from oracles.problem import PARTS, SIZE


class Pushes:
    """What workers push, through a codec or as it is; what is not applied stays out of what a codec remembers."""

    def __init__(self, trace, codec):
        self._trace, self._codec = trace, codec
        self._kept = {worker: np.zeros(SIZE) for worker in range(trace.workers)}

    def gradient(self, step, g, has):
        """What the server gets of a step's gradient; parameters without one are left out, and what is kept of them stays."""
        if self._codec is None:
            return g
        coded, kept = self._trace.sent[step.worker][step.number], self._kept[step.worker]
        is_in = np.concatenate([np.full(part.stop - part.start, own) for part, own in zip(PARTS, has, strict=True)])
        given = np.where(is_in, g + kept, 0.0)
        close(coded.given, given, self._codec.tolerance, f"what worker {step.worker} codes in step {step.number}")
        if step.applied >= 0:
            left = (given - coded.decoded) * self._codec.remembers
            self._kept[step.worker] = np.where(is_in, left, kept)
        return np.where(is_in, coded.decoded, 0.0)


def run(trace, start, optimizer, *, clip=None, codec=None, linear=False):
    """The vector after all updates, each made of the mean of its gradients, weighted by samples: sync, async, bounded,
    rennala and ringmaster, which differ in what they admit. `linear`: the learning rate is multiplied by their number."""
    versions, pushes = [start], Pushes(trace, codec)
    pushed = {}
    for step in sorted(trace.steps, key=lambda one: (one.read, one.number)):
        while len(versions) <= step.read:
            _update(versions, trace, pushed, optimizer, linear)
        if step.samples:
            g, has = step.gradient(versions[step.read], clip)
            pushed[step.worker, step.number] = pushes.gradient(step, g, has), has
    while len(versions) <= trace.versions:
        _update(versions, trace, pushed, optimizer, linear)
    return versions[-1]


def _update(versions, trace, pushed, optimizer, linear):
    steps = trace.making(len(versions))
    own = [pushed[one.worker, one.number] for one in steps]
    weights = np.array([one.samples for one in steps], dtype=float)
    g = sum(weight * q for weight, (q, _) in zip(weights, own, strict=True)) / weights.sum()
    has = np.logical_or.reduce([one for _, one in own])
    versions.append(optimizer.step(versions[-1], g, has, len(steps) if linear else 1))
