"""AdaptiveRevision, McMahan and Streeter 2014: AdaGrad that revises its steps once it knows what overlapped."""

import numpy as np

from oracles.problem import SIZE, elements_with
from oracles.servers import Pushes


def run(trace, start, alpha, *, clip=None, codec=None):
    """The vector after all updates, each of one gradient.

    G: sum of the gradients applied; z: what rates fall with; z_max: its greatest value so far, so that rates never rise.
    """
    versions, sums, pushes = [start], [np.zeros(SIZE)], Pushes(trace, codec)
    z, z_max = np.ones(SIZE), np.ones(SIZE)
    for version in range(1, trace.versions + 1):
        (step,) = trace.making(version)
        g, has = step.gradient(versions[step.read], clip)
        g = pushes.gradient(step, g, has)
        x, G, of = versions[-1].copy(), sums[-1].copy(), elements_with(has)
        overlap = G - sums[step.read]
        old_rate = alpha / np.sqrt(z_max)
        z[of] += (g**2 + 2 * g * overlap)[of]
        z_max = np.maximum(z, z_max)
        rate = alpha / np.sqrt(z_max)
        x[of] += (-rate * g + (old_rate - rate) * overlap)[of]
        G[of] += g[of]
        versions.append(x)
        sums.append(G)
    return versions[-1]
