"""What every algorithm is: a frozen dataclass with one worker program."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.errors import AlgorithmWarning, OverrideWarning, UsageError
from paceline.optim.settings import check_linear, check_no_line_search
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs
from paceline.specs.types import check_fields

if TYPE_CHECKING:
    import torch

__all__ = ["Algorithm", "Closures"]

Closures = Literal["in place", "in rounds", "on a copy", "once"]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How workers agree on parameters. Subclasses are immutable data plus `work`, written in the order of the paper."""

    #: What may happen to a worker without ending the training of the others: "kill", "straggler".
    tolerates: ClassVar[tuple[str, ...]] = ()
    #: Whether all workers make one update together, each from its share of the round's batches.
    lockstep: ClassVar[bool] = False
    #: Whether every worker gets every batch, in the same order, as those do that have a part of the model each.
    same_batches: ClassVar[bool] = False
    #: The most workers it can use; None: any number.
    max_workers: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs(self) -> Needs:
        """What `work` asks of its ports: the kind of shared parameters, collectives, messages, servers."""
        raise TypeError(f"{type(self).__name__} must say what it needs")

    @property
    def patience_s(self) -> float:
        """How long a peer may be silent before it counts as lost; a method that goes on without it takes it back later."""
        return 5.0

    @property
    def default_learning_rate(self) -> float | None:
        """The rate of a training that names none; None: the task's own, which suits SGD."""
        return None

    @property
    def overrides(self) -> str:
        """A sentence where the method leaves out what the user has said about the optimizer, though it need not; or empty."""
        return ""

    def caution(self, num_workers: int, delay: int | None = None) -> str:
        """A sentence where these arguments are possible and likely not what is meant; or empty.

        `delay` is what the program has chosen; None: it has chosen nothing yet.
        """
        return ""

    def warn(self, num_workers: int, stacklevel: int = 3) -> None:
        """Warns of what it overrides, if anything, and of arguments that are likely not meant."""
        for sentence, category in ((self.overrides, OverrideWarning), (self.caution(num_workers), AlgorithmWarning)):
            if sentence:
                warnings.warn(sentence, category, stacklevel=stacklevel)

    def figures(self, delay: int, num_workers: int) -> dict[str, Any]:
        """What a result says of this method only; `delay` is what its program has chosen (`Counts.delay`)."""
        return {}

    def note(self, num_workers: int) -> str:
        """A sentence for the run's result, as where so many workers leave chosen options without effect; or empty."""
        return ""

    def lost_with(self, workers: Sequence[int]) -> str:
        """A sentence on what is lost with workers that have died, beside their last gradients; or empty."""
        return ""

    @property
    def gossip(self) -> bool:
        """Whether every worker has a model of its own, and the run's is their mean; versions are then each worker's own."""
        return self.needs.own_models

    @property
    def in_rounds(self) -> bool:
        """Whether all workers take part in every round, and so end, and are checkpointed, after the same one.

        A checkpoint needs the parts of all of them: rounds depend on the number of workers, and workers that have the same
        batches each have a part of the model.
        """
        return self.lockstep or self.same_batches

    @property
    def together(self) -> bool:
        """Whether several workers' gradients make one update of one model: they then share its version, and none is stale."""
        return self.lockstep and not self.gossip

    @property
    def by_speed(self) -> bool:
        """Whether each worker's batch of a round is as large as it is fast; `Replica.shares` says how large."""
        return False

    @property
    def averages_in_backward(self) -> bool:
        """Whether gradients are the mean of all workers' when `backward` returns."""
        return False

    @property
    def clips_before_the_mean(self) -> bool:
        """Whether an update is a mean of several workers' gradients, each as its worker's loop has left it, clipped or not."""
        return self.together and not self.averages_in_backward

    @property
    def takes_several_optimizers(self) -> bool:
        """Whether a loop may have several optimizers; programs that send messages know of one."""
        return not self.needs.mailbox

    @property
    def splits_update(self) -> bool:
        """Whether a worker makes a part of the update only, and sees no more of the mean gradient and the state."""
        return False

    def closures(self, num_workers: int) -> Closures:
        """How an optimizer's closure is evaluated, as `ClosureGradient` lists it."""
        if self.needs.kind == "served" or self.same_batches or self.lets_gradients_wait:
            return "once"
        return "on a copy" if num_workers > 1 else "in place"

    @property
    def takes_shards(self) -> bool:
        """Whether a layout may cut parameters over groups of workers: the program averages shards across groups."""
        return False

    def weighting(self, num_workers: int) -> str:
        """The option by which each gradient has a factor of its own, which only a linear optimizer can follow; or empty."""
        return ""

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer], num_workers: int) -> None:
        """Refuses optimizers whose state would be wrong under this algorithm; call it before the first step."""
        check_linear(optimizers, self.weighting(num_workers))
        if num_workers > 1 and self.closures(num_workers) != "in rounds":
            check_no_line_search(optimizers)

    @property
    def lets_gradients_wait(self) -> bool:
        """Whether a gradient may be applied in a later update than the one that it came for."""
        return False

    def check(self, num_workers: int) -> None:
        """Refuses a number of workers that the algorithm cannot run with."""
        if self.max_workers is not None and num_workers > self.max_workers:
            raise UsageError(
                f"{type(self).__name__.lower()} runs with {self.max_workers} worker, not {num_workers}: use"
                f" --workers {self.max_workers}."
            )

    def work(self, replica: Replica, ports: Ports[Any]) -> None:
        """One worker's program, from its first step to its last; blocking, and the same on every backend."""
        raise TypeError(f"{type(self).__name__} has no worker program")
