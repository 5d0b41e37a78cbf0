"""Refuse a loop that computes gradients and never steps: when it updates by hand, or when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.loop.looked_up_tables import LookedUpTable

_BATCHES, _PASSES = 2, 10  # with moves: a step may move the parameters, compute there, and put them back
_SAYS = (
    "The loop has made gradients and never called optimizer.step(), so nothing was trained: call step() of the optimizer that"
    " attach was given, and leave the parameters to it. If that optimizer wraps another, give attach the inner one."
)


class StepsAwaited:
    """Watches a loop's gradients before its first step.

    A loop that ends before its first step, at a `break` or during accumulation, has made gradients, too. So gradients count
    only if the loop has discarded them and made others, has reached the end of its batches, or has changed the parameters
    itself.

    A loop updates by hand if every parameter with a gradient has another sum at each of two batches in a row, or without
    `worker.batches` at ten passes in a row: an inner loop, or a sharpness-aware step, may restore the parameters.

    Costs: a sum of each parameter for every batch, until the first step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters  # the trained ones; gradients that they already have are ignored
        self._before = [None if p.grad is None else (p.grad, p.grad._version) for p in parameters]
        self._made: list[torch.Tensor | None] = [None] * len(parameters)
        self._threw_away = False
        self.came_to_end = False  # whether the loop has had all batches of an epoch
        self.begin()

    def begin(self, *, is_shared: bool = False) -> None:
        """The loop gets the parameters of its first step; `is_shared`: other workers write them, too."""
        self._is_shared, self._num_moves = is_shared, 0
        self._take()

    def _take(self) -> None:
        self._sums = self._sums_now()
        self._counts = [p._version for p in self._parameters]

    def check(self, *, has_batches: bool) -> None:
        """The loop is about to compute again in its first step, with `worker.batches` or without.

        Raises:
            UsageError: it updates its parameters by hand.
        """
        moved = [
            _differ(before, now) and not (self._is_shared and p._version == count)
            for p, before, now, count in zip(self._parameters, self._sums, self._sums_now(), self._counts, strict=True)
        ]
        made = [one is not None and bool(one.any()) for one in self._made]
        have_moved = any(moved) and all(compress(moved, made) if any(made) else moved)
        self._num_moves = self._num_moves + 1 if have_moved else 0
        if self._num_moves == (_BATCHES if has_batches else _PASSES):
            raise UsageError(_SAYS)
        self._take()

    def look(self, num_passes: int = 0) -> None:
        """The loop is about to compute, after `num_passes` backward passes if they are counted; or it has ended."""
        made = [
            None if _is_old(p.grad, before) else p.grad
            for p, before in zip(self._parameters, self._before, strict=True)
        ]
        is_cleared = not any(one is not None and one.any() for one in made)
        self._threw_away |= is_cleared and (num_passes > 0 or any(one is not None for one in self._made))
        self._threw_away |= any(
            old is not None and new is not None and old is not new for old, new in zip(self._made, made, strict=True)
        )
        self._made = [old if new is None else new for old, new in zip(self._made, made, strict=True)]

    def error(self, *, loaded: bool, has_begun: bool) -> UsageError | None:
        """The error to raise if the loop has ended and no worker has made an update; None: no error.

        Args:
            loaded: whether `load_state_dict` has changed the parameters, which is no training.
            has_begun: whether the loop has had a batch, or called the model with gradients enabled.
        """
        self.look()
        has_made = any(gradient is not None for gradient in self._made)
        has_moved = not loaded and any(map(_differ, self._sums, self._sums_now()))
        if self._threw_away or (has_made and self.came_to_end) or (has_moved and (has_made or has_begun)):
            return UsageError(_SAYS)
        return None

    def _sums_now(self) -> list[str]:
        """As text, in which NaN equals itself; empty for tables whose rows come and go."""
        return [
            "" if type(p) is LookedUpTable else float(p.detach().sum(dtype=torch.float64)).hex()
            for p in self._parameters
        ]


def _differ(before: str, now: str) -> bool:
    return before != now and before != "" != now


def _is_old(gradient: torch.Tensor | None, before: tuple[torch.Tensor, int] | None) -> bool:
    return gradient is not None and before is not None and gradient is before[0] and gradient._version == before[1]
