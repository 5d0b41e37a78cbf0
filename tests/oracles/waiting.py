"""Servers whose gradients are weighted, or wait so many updates before they are applied: staleness that is injected."""

from dataclasses import replace

import numpy as np

from oracles.problem import SIZE
from oracles.servers import Pushes


def run(trace, start, rule, *, clip=None, codec=None, weight=lambda steps: 1.0):
    """The vector after all updates.

    A gradient, or the mean of those that came together, counts as an update when it comes, in version `ready + 1`. It is
    applied in version `applied`, after those that came before it; what waits when the run ends is never applied.

    Args:
        trace: of the run.
        start: the vector.
        rule: what applies gradients.
        clip: of each worker's gradient.
        codec: of each worker's gradient.
        weight: on the mean of some steps' gradients.
    """
    versions, gradients, due, pushes = [start], {}, {}, Pushes(trace, codec)
    for step in trace.steps:
        if step.applied > 0:
            due.setdefault(step.applied, {}).setdefault(step.ready, []).append(step)
    for step in sorted(trace.steps, key=lambda one: (one.read, one.number)):
        _make(versions, step.read, due, gradients, rule, weight)
        g, has = step.gradient(versions[step.read], clip)
        taken = replace(step, applied=max(step.applied, 0))  # also what waits when the run ends
        gradients[step.worker, step.number] = pushes.gradient(taken, g, has), has
    _make(versions, trace.versions, due, gradients, rule, weight)
    return versions[-1]


def _make(versions, until, due, gradients, rule, weight):
    while len(versions) <= until:
        x, arrivals = versions[-1], due.get(len(versions), {})
        for arrival in sorted(arrivals):
            steps = arrivals[arrival]
            own = [gradients[one.worker, one.number] for one in steps]
            total = sum((one.samples * g for one, (g, _) in zip(steps, own, strict=True)), np.zeros(SIZE))
            has = np.logical_or.reduce([one for _, one in own])
            x = rule.step(x, weight(steps) * total / sum(one.samples for one in steps), has)
        versions.append(x)
