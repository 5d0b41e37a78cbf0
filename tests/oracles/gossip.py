"""Decentralized SGD: every worker has a model of its own and averages with its neighbours."""

import numpy as np


def ring(worker, workers, k):
    """The workers before and after."""
    return {(worker - 1) % workers, (worker + 1) % workers} - {worker}


def complete(worker, workers, k):
    """All others."""
    return set(range(workers)) - {worker}


def exponential(worker, workers, k):
    """The workers 1, 2, 4, ... ahead."""
    hops = [2**i for i in range(workers) if 2**i < workers]
    return {(worker + hop) % workers for hop in hops} - {worker}


def one_peer(worker, workers, k):
    """The worker 1, 2, 4, ... ahead, in turn."""
    hops = [2**i for i in range(workers) if 2**i < workers]
    return {(worker + hops[k % len(hops)]) % workers}


def metropolis(neighbours, workers, k):
    """W (workers, workers): 1 / (1 + the larger degree of the two) for each neighbour, and the rest for oneself."""
    of = [neighbours(worker, workers, k) for worker in range(workers)]
    W = np.zeros((workers, workers))
    for i, others in enumerate(of):
        for j in others:
            W[i, j] = 1 / (1 + max(len(others), len(of[j])))
        W[i, i] = 1 - W[i].sum()
    return W


def d_psgd(trace, start, make_optimizer, neighbours, *, clip=None):
    """By worker, its model after all rounds of Lian et al. 2017: x_i = sum_j W_ij x_j - rate g(x_i).

    The gradient is of a worker's model before it is mixed; the optimizer steps on what is mixed. A worker without a batch
    mixes only.
    """
    models = dict.fromkeys(range(trace.workers), start)
    optimizers = {worker: make_optimizer() for worker in models}
    rounds = {worker: trace.of(worker) for worker in models}
    for k in range(max(map(len, rounds.values()))):
        W = metropolis(neighbours, trace.workers, k)
        mixed = W @ np.stack(list(models.values()))
        for worker, steps in rounds.items():
            step, x = steps[k], mixed[worker]
            if step.samples and not step.overflows:
                x = optimizers[worker].step(x, *step.gradient(models[worker], clip))
            mixed[worker] = x
        models = dict(enumerate(mixed))
    return models


def ad_psgd(trace, start, make_optimizer, *, clip=None):
    """By worker, its model after its own updates and the halves of its exchanges, of Lian et al. 2018.

    In an exchange two workers' models, as each sent it, come to the mean of both: each moves by half of the difference, the
    one by the opposite of the other, so that the mean of all models moves by gradients alone. Gradients are of a model of
    earlier.
    """
    models = {worker: [start] for worker in range(trace.workers)}
    for worker, own in models.items():
        optimizer, steps = make_optimizer(), {one.applied: one for one in trace.of(worker)}
        halves = iter(trace.halves[worker])
        while len(own) in steps or (half := next(halves, None)):
            if (step := steps.get(len(own))) is not None:
                own.append(optimizer.step(own[-1], *step.gradient(own[step.read], clip)))
            else:
                own.append(own[-1] + (half.there - half.here) / 2)
    for worker, halves in trace.halves.items():
        for half in halves:
            assert any(np.allclose(half.here, x, rtol=0, atol=1e-10) for x in models[worker])
            assert any(np.allclose(half.there, x, rtol=0, atol=1e-10) for x in models[half.peer])
            opposite = [
                (one.there.tobytes(), one.here.tobytes()) for one in trace.halves[half.peer] if one.peer == worker
            ]
            assert (half.here.tobytes(), half.there.tobytes()) in opposite or half.peer not in trace.models
    return {worker: own[-1] for worker, own in models.items() if worker in trace.models}
