"""PowerSGD, Vogels et al. 2019: matrices' means as products of thin factors, with error feedback at the workers."""

import numpy as np

from oracles.problem import PARTS, SHAPES, SIZE


class LowRank:
    """In the place of `lockstep.Feedback`.

    A worker keeps what its own matrix lacks, in units of the mean. A matrix that has no gradient on any worker is left out;
    a column of Q that becomes zero stays as it was.

    Args:
        trace: of the run.
        rights: by parameter, the first Q (columns, r) of a matrix that travels as factors; the same on all workers.
        warmup: so many means send all as it is.
    """

    def __init__(self, trace, rights, warmup):
        self._rights, self._warmup = rights, warmup
        self._count = 0
        self._kept = {worker: np.zeros(SIZE) for worker in range(trace.workers)}

    def mean(self, number, vectors, has):
        """The mean of vectors with weights, by worker, of the parameters that have a gradient."""
        self._count += 1
        total = sum(weight for _, weight in vectors.values())
        shares = {worker: weight / total for worker, (_, weight) in vectors.items() if weight}
        given = {worker: vectors[worker][0] + self._kept[worker] / share for worker, share in shares.items()}
        mean = sum(share * given[worker] for worker, share in shares.items())
        for name, part, own in zip(SHAPES, PARTS, has, strict=True):
            if not own:
                mean[part] = 0.0
            elif name in self._rights and self._count > self._warmup:
                matrices = {worker: one[part].reshape(SHAPES[name]) for worker, one in given.items()}
                P = orthonormal(sum(share * matrices[worker] @ self._rights[name] for worker, share in shares.items()))
                rights = {worker: M.T @ P for worker, M in matrices.items()}
                right = sum(share * rights[worker] for worker, share in shares.items())
                mean[part] = (P @ right.T).ravel()
                self._rights[name] = np.where(right.any(axis=0), right, self._rights[name])
                for worker, M in matrices.items():
                    self._kept[worker][part] = shares[worker] * (M - P @ rights[worker].T).ravel()
        return mean


def orthonormal(columns):
    """Gram's and Schmidt's; a column of zeros stays zero."""
    found = []
    for one in columns.T:
        for before in found:
            one = one - (one @ before) * before
        found.append(one / (np.linalg.norm(one) or 1.0))
    return np.stack(found, axis=1)
