"""Downpour SGD, Dean et al. 2012: workers step by themselves, push what they have accrued, fetch now and then."""

import numpy as np

from oracles.problem import PARTS, SIZE
from oracles.servers import Pushes


def run(trace, start, rule, make_optimizer, *, fetch, push, overlap=False, clip=None, codec=None):
    """The servers' vector after all updates.

    Args:
        trace: of the run.
        start: the vector.
        rule: the servers'; each push is one update.
        make_optimizer: a worker's own, for steps between fetches.
        fetch: n_fetch.
        push: n_push; after its last step a worker pushes what it has accrued.
        overlap: what is fetched takes the place of the vector after the next gradient, which then moves it.
        clip: of each gradient.
        codec: of what is pushed.
    """
    versions, pushed, pushes = [start], {}, Pushes(trace, codec)
    optimizers = {worker: make_optimizer() for worker in range(trace.workers)}
    local, own_steps = dict.fromkeys(optimizers), {}
    nothing = np.zeros(SIZE), np.zeros(len(PARTS), dtype=bool)
    accrued = dict.fromkeys(optimizers, nothing)
    places = {(one.worker, one.number): k + 1 for worker in optimizers for k, one in enumerate(trace.of(worker))}

    def update():
        (step,) = (one for one in trace.making(len(versions)) if (one.worker, one.number) in pushed)
        versions.append(rule.step(versions[-1], *pushed.pop((step.worker, step.number))))

    for step in sorted(trace.steps, key=lambda one: (one.read, one.number)):
        while len(versions) <= step.read:
            update()
        worker, k = step.worker, places[step.worker, step.number]
        if k == 1 or (not overlap and (k - 1) % fetch == 0) or (overlap and k > 2 and (k - 2) % fetch == 0):
            local[worker] = versions[step.read]
        if worker in own_steps:
            local[worker] = optimizers[worker].step(local[worker], *own_steps.pop(worker))
        g, has = step.gradient(local[worker], clip)
        accrued[worker] = accrued[worker][0] + g, accrued[worker][1] | has
        if overlap or k % fetch:
            own_steps[worker] = g, has
        if k % push == 0 or (k == len(trace.of(worker)) and step.applied > 0):
            sent, has = accrued[worker]
            pushed[worker, step.number] = pushes.gradient(step, sent, has), has
            accrued[worker] = nothing
    while len(versions) <= trace.versions:
        update()
    return versions[-1]
