"""Sparse Hogwild!: linear models, matrix completion and graph cuts, on all cores, without locks.

Compiled kernels (Numba) that release the GIL, run by threads that share one vector of parameters. scikit-learn
estimators over them are in `paceline.sklearn`.
"""

from paceline.sparse.linear import DivergedError, LinearModel
from paceline.sparse.losses import Loss

__all__ = ["DivergedError", "LinearModel", "Loss"]
