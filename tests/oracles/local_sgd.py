"""Local SGD and its kin: steps on models of one's own, averaged every few steps, perhaps late: DaSGD and CoCoD-SGD."""

import numpy as np

from oracles.lockstep import Feedback, weighted_mean
from oracles.problem import PARTS


def run(
    trace, start, make_optimizer, *, period, warmup=0, delay=0, local_weight=0.0, merge="paper", compensate=False,
    clip=None, codec=None, means=None,
):  # fmt: skip
    """By worker, its model after all rounds: H steps alone, then the mean of all models, weighted alike.

    Args:
        trace: of the run.
        start: the parameters.
        make_optimizer: a worker's.
        period: H, from one mean to the next, counted with the warm-up.
        warmup: so many steps make all workers step with the mean of their gradients instead, each clipped before.
        delay: d, steps from the models of which a mean is to its merge.
        local_weight: xi, of a worker's own model in the merge.
        merge: "paper" x = xi x + (1 - xi) mean; "corrected" x = x + (1 - xi) (mean - sent); "cocod" x = x + mean - sent.
        compensate: whether rates are divided by what merges of the first kind leave of the steps.
        clip: of each gradient.
        codec: of what a model has changed since the last mean.
        means: what makes means through a codec, if not `Feedback`.
    """
    models = dict.fromkeys(range(trace.workers), start)
    optimizers = {worker: make_optimizer() for worker in models}
    xi = 0.0 if merge == "cocod" else local_weight
    if compensate and merge == "paper":
        for one in optimizers.values():
            one.rate /= 1 - (1 - xi) * delay / period
    rounds = {worker: trace.of(worker) for worker in models}
    means, everything = means or (codec and Feedback(trace, codec)), np.ones(len(PARTS), dtype=bool)
    anchor, number = start, 0
    under_way = None
    for k in range(1, max(map(len, rounds.values())) + 1):
        steps = {worker: own[k - 1] for worker, own in rounds.items()}
        gradients = {worker: one.gradient(models[worker], clip) for worker, one in steps.items()}
        if k <= warmup:
            mean = weighted_mean([g for g, _ in gradients.values()], [one.samples for one in steps.values()])
            has = np.logical_or.reduce([has for _, has in gradients.values()])
            gradients = dict.fromkeys(models, (mean, has))
        left_out = k <= warmup and any(one.overflows and one.samples for one in steps.values())
        for worker, one in steps.items():
            if not left_out and (k <= warmup or (one.samples and not one.overflows)):
                models[worker] = optimizers[worker].step(models[worker], *gradients[worker])
        for _ in range(2):  # what is due is merged before the next leaves, which is due at once without a delay
            if under_way is not None and under_way[0] == k:
                _, sent, mean = under_way
                for worker, x in models.items():
                    models[worker] = (
                        xi * x + (1 - xi) * mean if merge == "paper" else x + (1 - xi) * (mean - sent[worker])
                    )
                under_way = None
            elif under_way is None and k > warmup and k % period == 0:
                changes = {worker: (x - anchor, 1) for worker, x in models.items()}
                if means is None:
                    anchor = np.mean(list(models.values()), axis=0)
                else:
                    anchor, number = anchor + means.mean(number, changes, everything), number + 1
                under_way = k + delay, models.copy(), anchor
    return models
