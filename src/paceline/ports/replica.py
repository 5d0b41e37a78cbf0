"""The replica as a worker program sees it: its model, optimizer and data, besides the ports of `ports.py`.

Shapes: as there; P is the number of the model's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from paceline.optim.ranges import Ranges
from paceline.optim.rows import Rows, Table
from paceline.optim.settings import OptimizerSettings
from paceline.ports.lookups import Lookups
from paceline.ports.round_shares import RoundShares

OnBucket = Callable[[torch.Tensor], None] | None
"""Called with each bucket of a gradient as soon as it is complete."""

OnEnd = Callable[[], None] | None
"""Called at the end of a backward pass."""


class Piece(NamedTuple):
    """Some elements of the flat vector (P,) that one worker owns, and their place among all its elements."""

    first: int
    length: int
    at: int


class Replica(Protocol):
    """This worker's model, optimizer and data.

    A step is `gradient`, then `apply` at most once, then `applied`, `dropped` or `accrued`.
    """

    step: int  # the present one, from 1
    changed_outside: bool  # the loop has changed parameters by itself, and not all workers know it yet
    moves: bool  # the loop moves parameters during a step: it must not get a vector that other workers read
    round: int | None  # the loop's present lockstep round of batches; None: its steps are never left out
    round_samples: int  # of all workers; set by programs that learn it from a mean
    shares: RoundShares | None  # of each round's samples, if batch sizes follow worker speed
    scaled: (
        bool  # the loop scales its loss by GradScaler, which skips a step if the gradient that comes back is not finite
    )
    skipped: bool  # GradScaler has left out the last `apply`, on all workers that share the gradient
    closure: bool | None  # whether the loop passed one to its step; None: it has not stepped, or it does not matter
    evaluations: Any  # the program's, if closures are evaluated in rounds (`algorithms/evaluations.py`)
    deal: Any  # of `worker.batches`, or a task's batches, in rounds; None: they are not dealt in rounds
    given: dict[str, Any] | None  # what this newcomer got from the first worker, until its first step
    before_meeting: Callable[[], None] | None  # called before this worker waits for all others in `worker.sum`
    lookups: (
        Lookups | None
    )  # the loop's large tables, whose rows the program may bring one by one; None: there are none

    def carries_all(self) -> bool:
        """Whether newcomers can have all that this worker's loop has: its optimizer, and its schedulers."""
        ...

    def for_newcomers(self) -> dict[str, Any]:
        """What newcomers need of this replica, whose step is to begin; after `carries_all`."""
        ...

    def let_in(self, members: Sequence[int]) -> dict[str, Any]:
        """These are the workers now; returns the deal of batches for those that are new."""
        ...

    @property
    def g(self) -> torch.Tensor:
        """The gradient of the last call of `gradient`, (P,); a program may overwrite it before `apply`.

        After `take_rows`, the elements that `rows` select (count,), if some gradients are sparse.
        """
        ...

    @property
    def rows(self) -> Rows | None:
        """The rows of the last `g`, if some gradients are sparse; None: `g` has all elements."""
        ...

    def take_rows(self) -> None:
        """The program takes sparse gradients as they are; else they raise an error, or are made dense."""

    @property
    def tables(self) -> Sequence[Table]:
        """The weights of embeddings with `sparse=True`, the same on all workers."""
        ...

    def take_tables(self) -> None:
        """As `take_rows`, and `rows` tells of all `tables`: a table that it leaves out has a dense gradient."""

    def put(self, rows: Rows, g: torch.Tensor) -> None:
        """After `take_tables`: the gradient becomes `g` (count,), of these rows."""

    @property
    def samples(self) -> int:
        """Number of samples in this step's batch; 0 when this worker has no batch in a lockstep round."""
        ...

    @property
    def ranges(self) -> Ranges:
        """The elements of each parameter in the flat vector; empty if only time is simulated."""
        ...

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The parameters' shapes, as `ranges`."""
        ...

    @property
    def rates(self) -> int:
        """A digest of the optimizer's learning rates; 0: they follow the run's progress, and may differ between workers."""
        ...

    @property
    def missing(self) -> Ranges:
        """The parameters without a gradient in this step: all of them if this worker has no batch."""
        ...

    @missing.setter
    def missing(self, agreed: Ranges) -> None:
        """Sets the parameters that `apply` leaves out."""

    @property
    def update_time_s(self) -> float:
        """A running mean of how long `apply` takes: the unit of back-off."""
        ...

    def optimizer_settings(self) -> OptimizerSettings:
        """The user's optimizer with its current settings, in a form that can be sent.

        Raises:
            UsageError: the optimizer is not element-wise.
        """
        ...

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """That optimizer's initial state, such as loaded momentum, as vectors (P,) or numbers; empty: none."""
        ...

    def steps(self) -> Iterator[int]:
        """This worker's steps, from 1, until its data end or the run is stopped."""
        ...

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Copies `x` (P,) into this worker's private vector and returns that."""
        ...

    def gradient(self, at: torch.Tensor, version: int, ready: OnBucket = None, finish: OnEnd = None) -> None:
        """Computes the mini-batch gradient at `at` (P,), which is `version` of the parameters; raises `NoGradient` at the end.

        `ready` is called during the backward pass with each bucket of `g` as soon as it is complete. Buckets are views that
        cover all of `g`, the last layers' first, in the same order and sizes on every worker and at every step. `ready` may
        start an operation, but not wait for one. The last element of `g`, in the first bucket, is no parameter's, and neither
        are the first 64 bytes, in the last bucket, by when `missing` is known. They are zero, and may carry numbers until
        `finish` returns.

        `finish` is called after the last bucket, at the end of the backward pass. It may wait; when it returns, `g` is the
        gradient, which a loop may clip or inspect before it steps. If a loop makes several backward passes in one step, both
        are called for each: the buckets then hold all that has been accumulated.

        After `take_tables`, `finish` comes alone; it reads `g` and `rows`, and calls `put`.
        """

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        """Lets the optimizer take its one step on `to` (P,), its learning rate multiplied by `scale`.

        With `of` (P,), `to` becomes `of` after the step; its earlier content does not matter. The gradient is multiplied by
        `weight`, so that momentum keeps each gradient's own factor. See `Algorithm.weighting`.
        """

    def apply_pieces(self, to: torch.Tensor, g: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Lets the optimizer take its one step on some elements only: `to` (S,), whose gradient is `g` (S,).

        The optimizer keeps state only for these, so they must be the same at every step. Gaps between the pieces are zero.

        Raises:
            UsageError: the optimizer is not element-wise.
        """

    def update_since(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """`after - before` (P,), stored in the gradient's memory, which the optimizer has used by now."""
        ...

    def applied(self, version: int, gradient_version: int, failed_publishes: int = 0) -> None:
        """The update became `version`; `gradient_version` was the newest when the gradient was ready."""

    def dropped(self, gradient_version: int, failed_publishes: int = 0) -> None: ...

    @property
    def rounds_begun(self) -> int:
        """The rounds of batches up to this step's last one; 0 if batches are not dealt in rounds."""
        ...

    def meet(self, members: Sequence[int], rounds: int | None = None) -> None:
        """A mean contains what these workers made of the first `rounds`: batches of all others are dealt again.

        None: of all rounds so far.
        """

    def absent(self, version: int) -> None:
        """This worker made no step: it had no batch in the round that made `version`, and has its own model; or nobody had."""

    def accrued(self) -> None:
        """The gradient is kept for a later update: the next `applied` or `dropped` includes it."""

    def settled(self, version: int) -> None:
        """After the last step: the accrued gradients became `version`; -1: they were dropped."""
