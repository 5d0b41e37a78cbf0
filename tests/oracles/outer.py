"""DiLoCo and Streaming DiLoCo, Douillard et al. 2023 and 2025: outer steps with the mean of what local steps have changed."""

import numpy as np

from oracles.lockstep import Feedback
from oracles.problem import PARTS, SIZE, elements_with


def run(
    trace,
    start,
    make_optimizer,
    *,
    period,
    rate,
    momentum,
    fragments,
    delay,
    local_weight,
    clip=None,
    codec=None,
    means=None,
):
    """By worker, its model after all rounds.

    Fragment p leaves every `period` steps, p / fragments of a period after the first; its outer step is merged `delay` steps
    later, where `local_weight` of a worker's own parameters stays. `momentum`: Nesterov's; None: plain SGD. `means`: of the
    parameters of a fragment, what makes its means through a codec, if not `Feedback`.
    """
    models = dict.fromkeys(range(trace.workers), start)
    optimizers = {worker: make_optimizer() for worker in models}
    rounds = {worker: trace.of(worker) for worker in models}
    outer, m, under_way = start.copy(), np.zeros(SIZE), []
    parts, number = dealt(fragments), 0
    elements = [elements_with(one) for one in parts]
    means = [means(one) for one in parts] if means else [Feedback(trace, codec) for _ in parts]

    def land(p, change):
        of = elements[p]
        m[of] = (momentum or 0.0) * m[of] + change[of]
        outer[of] -= rate * (change[of] + momentum * m[of] if momentum is not None else change[of])
        for worker, x in models.items():
            x = x.copy()
            x[of] = local_weight * x[of] + (1 - local_weight) * outer[of]
            models[worker] = x

    for k in range(1, max(map(len, rounds.values())) + 1):
        for worker, steps in rounds.items():
            step = steps[k - 1]
            if step.samples and not step.overflows:
                models[worker] = optimizers[worker].step(models[worker], *step.gradient(models[worker], clip))
        while under_way and under_way[0][0] <= k:
            land(*under_way.pop(0)[1:])
        for p in range(fragments):
            if (k - p * period // fragments) % period == 0:
                changes = {worker: ((outer - x) * elements[p], 1) for worker, x in models.items()}
                if codec is None:
                    change = np.mean([one for one, _ in changes.values()], axis=0)
                else:
                    change, number = means[p].mean(number, changes, parts[p]), number + 1
                under_way.append((k + delay, p, change))
                if not delay:
                    land(*under_way.pop(0)[1:])
    return models


def dealt(fragments):
    """By fragment, which parameters are in it: the largest first, each to the fragment that is the smallest so far."""
    of = [np.zeros(len(PARTS), dtype=bool) for _ in range(fragments)]
    sizes = np.array([part.stop - part.start for part in PARTS])
    for part in np.argsort(-sizes, kind="stable"):
        min(of, key=lambda own: sizes[own].sum())[part] = True
    return of
