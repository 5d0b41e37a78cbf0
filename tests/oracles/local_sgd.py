"""Local SGD and its kin: steps on models of one's own, averaged every few steps."""

import numpy as np


def run(trace, start, make_optimizer, *, period, clip=None):
    """By worker, its model after all rounds: H steps alone, then the mean of all models, weighted alike."""
    models = dict.fromkeys(range(trace.workers), start)
    optimizers = {worker: make_optimizer() for worker in models}
    rounds = {worker: trace.of(worker) for worker in models}
    for k in range(max(map(len, rounds.values()))):
        for worker, steps in rounds.items():
            if steps[k].passes and not steps[k].overflows:
                models[worker] = optimizers[worker].step(models[worker], *steps[k].gradient(models[worker], clip))
        if (k + 1) % period == 0:
            mean = np.mean(list(models.values()), axis=0)
            models = dict.fromkeys(models, mean)
    return models
