"""What a loop and its program need of the run that they take part in, however it was started."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from paceline.data.epoch_claims import EpochClaims
from paceline.loop.replica import AttachedReplica
from paceline.membership.final_mean import FinalMean, Given, LeftWeights
from paceline.membership.tables import Tables
from paceline.model_parallel.layouts import LayoutPart
from paceline.ports.ports import Ports
from paceline.vectors.flat import FlatBinding
from paceline.worker.gathering import Gatherer

__all__ = ["BatchShare", "Membership"]


class BatchShare(NamedTuple):
    """What `WorkerClaims` is told of a run's batches: where they are claimed, and which a resumed run leaves out."""

    counts: EpochClaims
    first: int = 0
    done: Container[int] = ()
    is_late: bool = False


class Membership(Protocol):
    """One worker's part in a run, from joining to leaving; what a way of running has nothing to do with, it inherits.

    Attributes:
        worker_id: 0 to num_workers - 1.
        num_workers: of the run.
        incarnation: how many processes of this worker have taken part before this one.
        seed: of the run.
        ports: what the worker's program is given.
        binding: the model's parameters as one vector.
        tables: what the workers tell each other beside their gradients.
        gatherer: brings values of all workers together.
        random_states: digests of the generators' states as the workers compare them; empty where nobody does.
        resumed_from: name of the checkpoint that the run goes on from; empty: of none.
        done_before: steps and samples of the run's earlier part.
        deals_batches: whether the run deals out the loader's batches; else the loader is the loop's own.
        has_own_process: whether it is this worker's alone: a fork of one whose threads go on may inherit locks that nobody
            gives back.
        streams: iterators that workers share which are threads of one process, by epoch; None: each has its own.
        fetches_ahead: whether batches may be fetched before the loop asks for them.
        stopped: tells whether the run is being stopped.
        snapshot: copies the run's newest parameters into a vector (P,).
        part: of the model that this worker has, under a layout; None: all of it.
        replica: makes the replica whose gradients the loop makes, for its optimizer.
    """

    worker_id: int = 0
    num_workers: int = 1
    incarnation: int = 0
    seed: int = 0
    ports: Ports[Any]
    binding: FlatBinding
    tables: Tables
    gatherer: Gatherer
    random_states: tuple[int, ...] = ()
    resumed_from: str = ""
    done_before: tuple[int, int] = (0, 0)
    deals_batches: bool = True
    has_own_process: bool = True
    streams: dict[int, object] | None = None
    fetches_ahead: bool = True
    stopped: Callable[[], bool]
    snapshot: Callable[[torch.Tensor], object]
    replica: Callable[[torch.optim.Optimizer], AttachedReplica]
    part: LayoutPart | None = None

    @property
    def dealt(self) -> tuple[int, int]:
        """This worker's place among those that share the batches, and how many these are."""
        return self.part.dealt if self.part is not None else (self.worker_id, self.num_workers)

    @property
    def draws_as(self) -> int:
        """As which worker it draws random numbers; those of a mesh draw the same."""
        return self.part.dealt[0] if self.part is not None and self.part.keeps_random_alike else self.worker_id

    def tell_epoch(self, samples: int, /) -> None:
        """The loop says about how many samples an epoch has."""

    def restore(self, optimizer: torch.optim.Optimizer) -> int:
        """Loads the optimizer's state, and the worker's own model, from what the run goes on from.

        Returns:
            the batches that the worker has taken so far.
        """
        return 0

    def batches(self) -> BatchShare:
        """Where batches are claimed."""
        ...

    def begin_epoch(
        self, epoch: int, first_batch: int, optimizer: torch.optim.Optimizer, taken: int, *, leads: bool
    ) -> None:
        """The loop is about to get its first batch of an epoch: the worker saves its part of a checkpoint, if one is wanted.

        Args:
            epoch: its number.
            first_batch: the number of its first batch, and of the checkpoint.
            optimizer: whose state is saved.
            taken: batches that this worker has taken.
            leads: whether it saves the parameters, too.
        """

    def complete_checkpoint(self) -> None:
        """Marks a checkpoint as complete once all workers have saved their parts, where no supervisor does."""

    def save_end(self, optimizer: torch.optim.Optimizer, taken: int) -> None:
        """Saves the worker's part of the run's last checkpoint, if there are any."""

    def has_updates(self) -> bool:
        """Whether a worker has made an update, as far as this one, which has made none, can know."""
        ...

    def final_model(self, out: torch.Tensor, given: Given, left: LeftWeights | None) -> FinalMean | None:
        """Copies what the run ends with into `out` (P,), for a worker whose program has ended: the same for all workers.

        That is what worker 0's loop has `left` in its model, if it has. Else it is the run's newest parameters after
        everybody's last update; where workers have models of their own, the mean of all, each of which tells how many batches
        it was `given`. Buffers are then worker 0's, but without a supervisor only if it has left something.

        Returns:
            what is known of that mean; None where there is none.

        Raises:
            WorkerLostError: another worker, whose part is needed, does not come within the deadline.
        """
        ...

    def make_whole(self, part: LayoutPart) -> None:
        """Gives the cut layers all their elements, with what the run ends with."""
        part.make_whole()

    def own_records(self) -> np.ndarray | None:
        """This worker's records, where no supervisor has them."""
        return None

    def write_end(self, model: nn.Module, mean: FinalMean | None) -> None:
        """The model has the run's result: writes down what whoever started the worker wants to know of its end."""

    def close(self, *, failed: bool) -> None:
        """Leaves the others, and gives the model memory of its own again."""
        ...
