"""A membership's view of a layout: how the model is divided, and this worker's part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from paceline.algorithms import Algorithm
from paceline.loop.buckets import PendingGradients
from paceline.optim.flat import FlatBinding
from paceline.optim.sharding import AxisShape, Sharding
from paceline.ports.ports import Mailbox, Ports
from paceline.ports.rooted import RootedCollectives


class LayoutPart(Protocol):
    """A layout's state in a worker's membership.

    Attributes:
        pending: gradients to be summed over several workers once these have sent theirs; None: there are none.
        without_batch: takes part in the others' passes, in a round without a batch; None: they do not need it.
    """

    binding: FlatBinding  # of the worker's own vector
    repeats: Callable[[], bool]  # tells whether the loop repeats its last batch, which gets no weight; set by `attach`
    sharding: Sharding | None  # how that vector is part of the whole model's; None: it is all of it
    whole: torch.Tensor | None  # the whole model's initial flat vector (W,); released by `begin`
    axes: Mapping[str, AxisShape]  # along which workers are related, by name
    dealt: tuple[int, int]  # this worker's index among those that share the batches, and their number
    is_recorded: bool  # whether its records have samples and batches; otherwise another worker's records have the same
    keeps_random_alike: bool  # whether workers with the same batches draw the same random numbers
    #: Whether operations, and not tensors, are divided, so that each parameter and buffer is whole on one worker.
    is_placed: bool
    mates: Mailbox | None  # the workers with the other parts, if these exchange messages; set by the membership

    @property
    def pending(self) -> PendingGradients | None: ...

    @property
    def without_batch(self) -> Callable[..., None] | None: ...

    def begin(self, ports: Ports[Any], axes: Mapping[str, RootedCollectives], algorithm: Algorithm) -> Ports[Any]:
        """Connects to the others; returns the program's ports, given those that it would have without a layout.

        `axes` are the collectives along the axes along which the worker is not alone.
        """
        ...

    def agreed(self, number: Callable[[], int]) -> int:
        """The number that the first of those with this model finds, at the same call of all of them."""
        ...

    def take_whole(self, x: torch.Tensor) -> None:
        """Sets the full parameters from the whole model's vector (W,)."""


class ShardedLayoutPart(LayoutPart, Protocol):
    """A worker's part of each tensor."""

    def clip(self, max_norm: float) -> float:
        """Clips the gradients to a norm of at most `max_norm`, over the whole model; returns the norm before."""
        ...

    def has_changed_gradients(self) -> bool:
        """Whether the loop has changed gradients between backward and step that the replica has not handed out."""
        ...

    def remove(self) -> None:
        """Restores the original behaviour of the model's layers; its parameters stay sharded."""

    def whole_of(self, x: torch.Tensor) -> torch.Tensor:
        """The whole model's vector (W,) from every worker's `x` (P,); all workers that share its model call it."""
        ...

    def make_state_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """Gathers the optimizer's full state; all workers call it."""

    def make_whole(self) -> None:
        """Gathers the full parameters from the other workers, which call it at the same time."""


class Division(NamedTuple):
    """How a layout divides a model among workers."""

    spec: str  # of the layout, the same on all workers
    #: Of a whole model, worker_id, num_workers, and the run's seed.
    part: Callable[[nn.Module, int, int, int], LayoutPart]
