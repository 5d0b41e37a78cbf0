"""The replica as a worker program sees it: what it does its own steps with, beside the ports of `ports.py`.

Shapes: as there; P is the number of the model's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from paceline.optim.settings import OptimizerSettings
from paceline.ports.round_shares import RoundShares
from paceline.vectors.flat import Ranges

__all__ = ["Piece", "Replica"]


class Piece(NamedTuple):
    """Some elements of the flat vector (P,) that one worker owns, and where they lie among all that it owns."""

    first: int
    length: int
    at: int


class Replica(Protocol):
    """This worker's model, optimizer and data: what a program does its steps with.

    A step is `gradient`, then `apply` at most once, then `applied`, `dropped` or `accrued`.
    """

    step: int  # the one under way, from 1
    changed_outside: bool  # the loop has changed parameters by itself, and not all workers know it yet
    moves: bool  # the loop moves parameters while a step is under way: it must not be given what other workers read
    round: int | None  # of batches in lockstep, that the loop has gone on to; None: its steps are never left out
    round_samples: int  # of all workers, where a mean over them has told the program, which tells it here
    shares: RoundShares | None  # of each round's samples, where batches are dealt by speed
    scaled: (
        bool  # the loop scales its loss by GradScaler, which skips a step if the gradient that comes back is not finite
    )
    skipped: bool  # GradScaler has left out the last `apply`, on all workers that share the gradient
    closure: bool | None  # whether the loop gave its step one; None: it has not stepped, or this is not asked for
    evaluations: Any  # the program's, where closures are evaluated in rounds (`algorithms/evaluations.py`)
    before_meeting: Callable[[], None] | None  # called before this worker waits for all others in `worker.sum`

    @property
    def g(self) -> torch.Tensor:
        """The gradient of the last `gradient`, (P,); what a program writes there is what `apply` uses."""
        ...

    @property
    def samples(self) -> int:
        """Number of samples in this step's batch; 0 when this worker has no batch in a lockstep round."""
        ...

    @property
    def ranges(self) -> Ranges:
        """The elements of each parameter in the flat vector; none where only time is simulated."""
        ...

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The parameters' shapes, as `ranges`."""
        ...

    @property
    def rates(self) -> int:
        """A digest of the optimizer's learning rates; 0: they may differ between workers, as they go by the run's progress."""
        ...

    @property
    def missing(self) -> Ranges:
        """The parameters that have no gradient in this step: all, where this worker has no batch."""
        ...

    @missing.setter
    def missing(self, agreed: Ranges) -> None:
        """What a program writes there is what `apply` leaves out."""
        ...

    @property
    def update_time_s(self) -> float:
        """A running mean of how long `apply` takes: the unit of back-off."""
        ...

    def optimizer_settings(self) -> OptimizerSettings:
        """The user's optimizer as of now, in a form that can be sent.

        Raises:
            UsageError: it is not one that works element by element.
        """
        ...

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """What that optimizer has come with, such as momentum, as vectors (P,) or numbers; nothing: it begins."""
        ...

    def steps(self) -> Iterator[int]:
        """This worker's steps, from 1, as long as there is data and nobody stopped the run."""
        ...

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Copies `x` (P,) into this worker's private vector and returns that."""
        ...

    def gradient(
        self,
        at: torch.Tensor,
        version: int,
        ready: Callable[[torch.Tensor], None] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Computes the mini-batch gradient at `at` (P,), which is `version` of the parameters; raises `NoGradient` at the end.

        `ready` is called during the backward pass with one bucket of `g` after the other, as soon as it is complete: views
        that cover all of `g`, the last layers' first, in the same order and sizes on every worker and at every step. It may
        start an operation, but not wait for one. The last element of `g`, in the first bucket, is padding, and so is the first
        element, in the last bucket, by when `missing` is known: they are zero, and may carry numbers until `finish` returns.

        `finish` is called after the last bucket, at the end of the backward pass. It may wait; what `g` holds when it returns
        is the gradient, which a loop may clip or inspect before it steps. Both may be called several times in one step, where
        a loop makes several backward passes: each time, the buckets hold all that has been accumulated.
        """
        ...

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        """Lets the optimizer take its one step on `to` (P,), its learning rate multiplied by `scale`.

        With `of` (P,), `to` becomes `of` after the step; what was in it before does not matter. The gradient is multiplied by
        `weight`: so what differs from gradient to gradient stays with it in momentum. See `Algorithm.weighting`.
        """
        ...

    def apply_pieces(self, to: torch.Tensor, g: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Lets the optimizer take its one step on some elements only: `to` (S,), whose gradient is `g` (S,).

        It keeps state for these alone, so they are the same at every step. What lies between the pieces is zero.

        Raises:
            UsageError: the optimizer does not work element by element.
        """
        ...

    def update_since(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """`after - before` (P,), kept in the gradient's memory, which the optimizer has used by now."""
        ...

    def applied(self, version: int, gradient_version: int, failed_publishes: int = 0) -> None:
        """The update became `version`; `gradient_version` was the newest when the gradient was ready."""
        ...

    def dropped(self, gradient_version: int, failed_publishes: int = 0) -> None:
        """The gradient was given up."""
        ...

    def absent(self, version: int) -> None:
        """This worker, whose model is its own, had no batch in the round that made `version`, and made no step."""
        ...

    def accrued(self) -> None:
        """The gradient is kept for a later update: the next that is `applied` or `dropped` is of this one, too."""
        ...

    def settled(self, version: int) -> None:
        """After the last step: what is still accrued became `version`; -1: it was given up."""
        ...
