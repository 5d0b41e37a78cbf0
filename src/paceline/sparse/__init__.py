"""Sparse Hogwild!: linear models, matrix completion and graph cuts, on all cores, without locks.

Compiled kernels (Numba) that release the GIL, run by threads that share one vector of parameters. scikit-learn
estimators over them are in `paceline.sklearn`.
"""

from paceline.sparse.completion import Completion
from paceline.sparse.cuts import GraphCut
from paceline.sparse.linear import DivergedError, LinearModel
from paceline.sparse.losses import Loss
from paceline.sparse.team import Team

__all__ = ["Completion", "DivergedError", "GraphCut", "LinearModel", "Loss", "Team"]
