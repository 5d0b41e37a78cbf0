"""The interface between a loop, with its program, and its run, however that was started."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from paceline.data.epoch_claims import EpochClaims
from paceline.data.round_deal import ALL_LEFT, Left
from paceline.loop.replica import AttachedReplica
from paceline.membership.final_mean import BatchesTaken, FinalMean, LeftWeights
from paceline.membership.tables import Tables
from paceline.optim.flat import FlatBinding
from paceline.ports.ports import Ports
from paceline.ports.views import Survivors
from paceline.worker.gathering import Gatherer
from paceline.worker.memberships.layout_part import LayoutPart, ShardedLayoutPart


class BatchShare(NamedTuple):
    """How `WorkerClaims` shares a run's batches: where they are claimed, and which ones a resumed run skips."""

    counts: EpochClaims
    left: Left = ALL_LEFT  # in lockstep; else only from which batch on
    done: Collection[int] = ()
    survivors: Survivors | None = None  # as for `RoundDeal`
    agreed: Callable[[Callable[[], int]], int] = lambda find: find()  # as for `WorkerClaims`


class LoopState(NamedTuple):
    """What a checkpoint has of a worker's loop."""

    optimizer: torch.optim.Optimizer
    taken: int  # batches that the worker has taken
    left: Left | None = None  # in rounds, what the run has left


class Membership(Protocol):
    """One worker's part in a run, from joining to leaving; implementations inherit defaults for what does not concern them."""

    worker_id: int = 0  # 0 to num_workers - 1
    num_workers: int = 1
    incarnation: int = 0  # how many processes of this worker have taken part before this one
    seed: int = 0
    ports: Ports[Any]
    binding: FlatBinding  # the model's parameters as one vector
    tables: Tables  # what the workers tell each other besides their gradients
    gatherer: Gatherer  # brings values of all workers together
    #: Digests of the generators' states as the workers compare them; empty if they do not.
    random_states: tuple[int, ...] = ()
    resumed_from: str = ""  # name of the checkpoint from which the run resumes; empty: none
    done_before: tuple[int, int] = (0, 0)  # steps and samples of the run's earlier part
    deals_batches: bool = True  # whether the run deals out the loader's batches; else the loader is the loop's own
    #: Whether the worker has a process to itself: a fork of a process with other threads may inherit locks that are
    #: never released.
    has_own_process: bool = True
    #: Iterators that workers in threads of one process share, by epoch; None: each has its own.
    streams: dict[int, object] | None = None
    fetches_ahead: bool = True  # whether batches may be fetched before the loop asks for them
    stopped: Callable[[], bool]  # tells whether the run is being stopped
    #: Copies the run's newest parameters into a vector (P,); where servers hold them, without ranges that are given as
    #: a second argument.
    snapshot: Callable[..., object]
    replica: Callable[[torch.optim.Optimizer], AttachedReplica]  # makes the loop's replica, given its optimizer
    part: LayoutPart | None = None  # of the model that this worker has, under a layout; None: all of it
    #: Whether workers save the last step when another one is lost, as each has all that it had.
    saves_after_loss: bool = False

    @property
    def leads(self) -> bool:
        """Whether what this worker's loop leaves in its model is the run's: worker 0, or the first one that is alive."""
        return not self.worker_id

    @property
    def dealt(self) -> tuple[int, int]:
        """This worker's place among those that share the batches, and how many these are."""
        return self.part.dealt if self.part is not None else (self.worker_id, self.num_workers)

    @property
    def draws_as(self) -> int:
        """The worker id for drawing random numbers; the workers of a mesh draw the same."""
        return self.part.dealt[0] if self.part is not None and self.part.keeps_random_alike else self.worker_id

    def tell_epoch(self, samples: int, /) -> None:
        """Notes about how many samples an epoch has."""

    def restore(self, optimizer: torch.optim.Optimizer) -> int:
        """Loads the optimizer's state, and the worker's own model, from the checkpoint from which the run resumes.

        Returns:
            the batches that the worker has taken so far.
        """
        return 0

    def batches(self) -> BatchShare:
        """Where batches are claimed."""
        ...

    def enter(self, epoch: int) -> dict[str, Any] | None:
        """Waits until the others let this worker in, if it replaces a dead one, or joins late, and they train on in rounds.

        Args:
            epoch: that its loop has reached; negative: it can go on in any.

        Returns:
            what the others have; empty: it needs nothing; None: the others are in a later epoch.

        Raises:
            NotReplacedError: they cannot let it in.
            RunStopped: they have ended.
        """
        return {}

    def reach_epoch(self, epoch: int) -> None:
        """The loop begins its next epoch, in which this worker may have no batch."""

    def take_part(self, epoch: int) -> None:
        """The loop has its first batch, in this epoch, or has begun a step with a batch of its own."""

    def begin_epoch(self, epoch: int | None, first_batch: int, state: LoopState, *, leads: bool, step: int = 0) -> None:
        """Saves the worker's part of a checkpoint, if one is due, before the loop gets its first batch of an epoch.

        Where workers have parts of one model, also before other steps.

        Args:
            epoch: its number; None: the step is within one.
            first_batch: the number of its first batch, or of the step's, and of the checkpoint.
            state: of the loop.
            leads: whether it saves the parameters, too.
            step: the number of the step that begins, from 1 in this process, where workers have parts of one model; else 0.
        """

    def before_batch(self) -> None:
        """The loop is about to get a batch: completes a checkpoint of which all parts are there, where no supervisor does."""

    def begin_fetching(self, loader: Any) -> None:
        """An epoch's batches of a loader are about to be fetched one by one, without an iterator of the loader."""

    @property
    def is_terminated(self) -> bool:
        """Whether SIGTERM ends this worker, without a supervisor, before its next step."""
        return False

    def raise_if_terminated(self) -> None:
        """Raises `Terminated` if SIGTERM ends this worker."""

    def save_end(self, state: LoopState) -> None:
        """Saves the worker's part of the run's last checkpoint, if there are any."""

    def save_after_loss(self, state: LoopState) -> None:
        """As `save_end`, when another worker is lost or SIGTERM ends this one."""
        self.save_end(state)

    def has_updates(self) -> bool:
        """Whether any worker is known to have made an update, given that this one has made none."""
        ...

    def final_model(self, out: torch.Tensor, given: BatchesTaken, left: LeftWeights | None) -> FinalMean | None:
        """Copies the run's result into `out` (P,), for a worker whose program has ended: the same for all workers.

        The result is the weights that worker 0's loop has `left` in its model, if any. Otherwise it is the run's newest
        parameters after all updates, or, if workers have their own models, the mean of all, for which each tells how many
        batches it was `given`. Buffers are then worker 0's; without a supervisor, only if it has left weights.

        Returns: the mean and its statistics; None without a mean.

        Raises:
            WorkerLostError: another worker, whose part is needed, does not come within the deadline.
        """
        ...

    def make_whole(self, part: ShardedLayoutPart) -> None:
        """Makes the cut layers whole, with the run's result."""
        part.make_whole()

    def own_records(self) -> np.ndarray | None:
        """This worker's records, if no supervisor has them."""
        return None

    def write_end(self, model: nn.Module, mean: FinalMean | None) -> None:
        """Writes the worker's final state for its launcher, once the model has the run's result."""

    def close(self, *, failed: bool) -> None:
        """Leaves the run, and gives the model its own memory again."""
