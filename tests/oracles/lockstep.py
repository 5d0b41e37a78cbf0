"""Synchronous SGD: one step with the mean of all workers' gradients, weighted by samples, perhaps through a codec."""

from dataclasses import replace

import numpy as np

from oracles.events import close
from oracles.problem import PARTS, SIZE, clipped


def weighted_mean(vectors, weights):
    """sum w v / sum w; zeros of no vectors."""
    return sum((w * v for v, w in zip(vectors, weights, strict=True)), np.zeros(SIZE)) / max(sum(weights), 1)


def run(trace, start, optimizer, *, clip=None, clips_mean=True, marked=True, codec=None, means=None):
    """The parameters after all rounds.

    A round without `marked` averages after each backward pass what has come out so far, and with it once. A worker whose
    gradient is infinite lets all leave the step out, which leaves what codecs remember as it was; not if its batch is given
    again. `means`: what makes means through a codec, if not `Feedback`.
    """
    x, means, number = start, means or (codec and Feedback(trace, codec)), 0
    for version in range(1, trace.versions + 1):
        steps = trace.making(version)
        if any(one.overflows and one.samples for one in steps):
            continue
        g, has = np.zeros(SIZE), np.zeros(len(PARTS), dtype=bool)
        most = max(len(one.passes) for one in steps)
        for pieces in [range(most)] if marked else [range(k, k + 1) for k in range(most)]:
            parts = [_passes(one, pieces) for one in steps]
            own = [part.gradient(x, None if clips_mean else clip) for part in parts]
            weights = [part.samples for part in parts]
            if means is None:
                g = g + weighted_mean([one for one, _ in own], weights)
            else:
                vectors = {s.worker: (g + o[0], w) for s, o, w in zip(steps, own, weights, strict=True)}
                g, number = (
                    means.mean(number, vectors, np.logical_or.reduce([has, *(one for _, one in own)])),
                    number + 1,
                )
            has = np.logical_or.reduce([has, *(one for _, one in own)])
        x = optimizer.step(x, clipped(g, clip) if clips_mean else g, has)
    return x


def _passes(step, which):
    which = [k for k in which if k < len(step.passes)]
    again = {place for place, k in enumerate(which) if k in step.again}
    return replace(step, passes=[step.passes[k] for k in which], again=again)


class Feedback:
    """A mean through a codec, with error feedback at the workers and at the mean; in units of the mean.

    What codecs draw at random, and where they round, is taken from the trace: what they are given is checked, so that
    everything remembered must be right. Parameters that have no gradient on any worker are left out: what is remembered of
    them stays.
    """

    def __init__(self, trace, codec):
        self._trace, self._codec = trace, codec
        self._kept = {worker: np.zeros(SIZE) for worker in range(trace.workers)}
        self._second = np.zeros(SIZE)

    def mean(self, number, vectors, has):
        """The mean of vectors with weights, by worker, of the parameters that have a gradient."""
        is_in = np.concatenate([np.full(part.stop - part.start, own) for part, own in zip(PARTS, has, strict=True)])
        total, mean = sum(weight for _, weight in vectors.values()), np.zeros(SIZE)
        for worker, (vector, weight) in vectors.items():
            if weight:
                share, coded = weight / total, self._trace.sent[worker][number]
                given = vector + self._kept[worker] / share
                close(coded.given, given, self._codec.tolerance, f"what worker {worker} codes of mean {number}")
                left = share * (given - coded.decoded) * self._codec.remembers
                self._kept[worker] = np.where(is_in, left, self._kept[worker])
                mean += share * coded.decoded
        coded = self._trace.means[number]
        given = mean + self._second
        close(coded.given, given, self._codec.tolerance, f"what is coded of mean {number}")
        left = (given - coded.decoded) * self._codec.remembers
        self._second = np.where(is_in, left, self._second)
        return np.where(is_in, coded.decoded, 0.0)
