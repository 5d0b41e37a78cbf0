"""`threshold=auto` and `gradients=auto`: the number of gradients per update from the measured gradient noise scale."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import torch
from torch import Tensor

from paceline.optim.half_types import sum_type
from paceline.system.saved_state import check_fits

_GROUPS = 20  # between two choices, and of which each is made
_MOST_PER_WORKER = 64


class NoiseMeter:
    """Repeatedly sets the number of gradients to the gradient noise scale, sigma^2 / |grad f|^2.

    From papers: both rules' number, max(1, ceil(sigma^2 / epsilon)), with sigma^2 = E |g - grad f|^2 and epsilon the target
    squared gradient norm, as recalled from Tyurin and Richtárik 2023 and Maranjyan et al. 2025; and the measurement by
    McCandlish et al.: each group of n gradients gives the mean of their squared norms and the squared norm of their mean.
    Derived here: the target is unknown, so the current |grad f|^2 replaces epsilon, and the number rises as it falls. While a
    group arrives, parameters move, which counts as noise; so do differences between the workers' data.
    Our own: the number starts at the number of workers and never falls below, since steps here do not grow with fewer
    gradients, and equally fast workers would lose most of theirs; the maximum is 64 per worker. Each choice uses 20 groups,
    which give the ratio to a factor of about 2, so it moves half of the way, in logarithms, and at most to twice the last
    number; if noise hides the gradient, the number stays.

    Costs: one vector; 3 vectors read and 1 written for each gradient.

    Reference: McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162.
    """

    moves = 4.0  # vectors, for each gradient: read once for its norm, and added up

    def __init__(self, num_workers: int) -> None:
        self._least = num_workers
        self._group = max(2, num_workers)
        self.gradients = num_workers  # the current number
        self._norms: deque[tuple[float, float]] = deque()
        self._sum: Tensor | None = None
        self._squares = 0.0
        self._count = 0

    def take(self, gradient: Tensor) -> None:
        """Adds a gradient (P_s,). One that is not finite is left out, with its whole group."""
        one = gradient.to(sum_type(gradient.dtype))
        square = _square(one)
        if not math.isfinite(square):
            self._begin_group()
            return
        if self._sum is None:
            self._sum = one.clone()  # the update may be made in the gradient's own memory
        else:
            self._sum.add_(one)
        self._squares += square
        self._count += 1
        if self._count == self._group:
            mean_square = _square(self._sum) / self._group**2
            self._norms.append((self._squares / self._group, mean_square))
            self._begin_group()
            if len(self._norms) == _GROUPS:
                self._choose()

    def _begin_group(self) -> None:
        self._sum, self._squares, self._count = None, 0.0, 0

    def _choose(self) -> None:
        # The squared norm of a mean of B gradients is |grad f|^2 + sigma^2 / B: two B determine both, without bias.
        (small, big), n = np.array(self._norms).mean(axis=0), self._group
        self._norms.clear()
        squared, noise = float(n * big - small) / (n - 1), float(small - big) / (1 - 1 / n)
        if squared > 0:
            found = max(0.0, noise / squared)
            half_way = math.sqrt(self.gradients * min(found, 4 * self.gradients))
            self.gradients = min(max(math.ceil(half_way), self._least), _MOST_PER_WORKER * self._least)

    def state(self) -> Tensor:
        """The number, the number of workers, and the groups' norms, as one row."""
        return torch.tensor(
            [[self.gradients, self._least, *(x for pair in self._norms for x in pair)]], dtype=torch.float64
        )

    def load(self, state: Tensor) -> None:
        """Restores what `state` returned, if the number of workers is the same; the unfinished group starts over."""
        check_fits(state, torch.zeros(1, state.numel() // 2 * 2, dtype=torch.float64), "what servers have measured")
        number, workers, *norms = state.flatten().tolist()
        if workers == self._least:
            self.gradients = int(number)
            self._norms = deque(zip(norms[::2], norms[1::2], strict=True))


def _square(x: Tensor) -> float:
    """|x|^2, added up in float64: in float32 the squares of elements above 1e19 overflow, and those below 1e-23 are 0."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64).square())
