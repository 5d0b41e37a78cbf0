"""The base class of algorithms: a frozen dataclass with one worker program."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.compression.codec import NoCodec
from paceline.errors import AlgorithmWarning, OverrideWarning, UsageError
from paceline.optim.settings import check_linear, check_no_line_search
from paceline.ports.ports import Ports, ServerPorts
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs
from paceline.specs.types import check_fields

if TYPE_CHECKING:
    import torch

    from paceline.algorithms.server.apply import ApplyRule
    from paceline.algorithms.server.delay import Delay

Closures = Literal["in place", "in rounds", "on a copy", "once"]
WaitsFor = Literal["everyone", "quorum", "neighbours", "slowest", "lock", "none"]
Slow = Literal["worker", "network"]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How workers agree on the parameters. Subclasses are immutable data plus `work`, written in the order of the paper."""

    #: Faults of one worker that the others survive, such as "kill" and "straggler".
    tolerates: ClassVar[tuple[str, ...]] = ()
    #: Whether all workers make one update together, each from its share of the round's batches.
    lockstep: ClassVar[bool] = False
    #: Whether every worker gets every batch, in the same order, as workers with different parts of the model do.
    same_batches: ClassVar[bool] = False
    #: Whether gradients are the mean of all workers' when `backward` returns.
    averages_in_backward: ClassVar[bool] = False
    #: Whether each part of a divided model may push its own gradients to servers of its own, and fetch from them.
    serves_parts: ClassVar[bool] = False
    #: Maximum number of workers; None: any number.
    max_workers: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs(self) -> Needs:
        """The ports that `work` uses: the kind of shared parameters, collectives, messages, servers."""
        raise TypeError(f"{type(self).__name__} must say what it needs")

    @property
    def patience_s(self) -> float:
        """How long a peer may be silent before it counts as lost; asynchronous methods take it back later."""
        return 5.0

    @property
    def default_learning_rate(self) -> float | None:
        """The default learning rate; None: the task's own, which suits SGD."""
        return None

    @property
    def overrides(self) -> str:
        """A sentence if the method overrides the user's optimizer settings; empty otherwise."""
        return ""

    def caution(self, num_workers: int, delay: int | None = None) -> str:
        """A sentence if these arguments are valid but likely a mistake; empty otherwise.

        `delay` is the delay that the program has chosen; None: not yet.
        """
        return ""

    def warn(self, num_workers: int, stacklevel: int = 3) -> None:
        """Warns of overridden settings and of arguments that are likely a mistake."""
        for sentence, category in ((self.overrides, OverrideWarning), (self.caution(num_workers), AlgorithmWarning)):
            if sentence:
                warnings.warn(sentence, category, stacklevel=stacklevel)

    def figures(self, delay: int, num_workers: int) -> dict[str, Any]:
        """Results specific to this method; `delay` is the delay that its program has chosen (`Counts.delay`)."""
        return {}

    def note(self, num_workers: int) -> str:
        """A sentence for the run's result, such as one about options without effect; empty if there is none."""
        return ""

    def lost_with(self, workers: Sequence[int]) -> str:
        """A sentence about what is lost with dead workers besides their last gradients; empty if nothing is."""
        return ""

    @property
    def gossip(self) -> bool:
        """Whether every worker has its own model and versions, and the run's model is their mean."""
        return self.needs.own_models

    @property
    def waits_for(self) -> WaitsFor | None:
        """Whom a step waits for, as `paceline blame` reads the records; None: they do not tell.

        The gradients or models of everyone, or of a quorum at the servers; the neighbours' models; the worker that is furthest
        behind; the lock that another holds; or none.
        """
        return "everyone" if self.lockstep else "none"

    def waiting_less(self, slow: Slow, num_workers: int) -> Algorithm | str | None:
        """An algorithm, or its spec, whose workers wait less if one worker or the network is slow; None: there is none."""
        return "ad-psgd" if self.lockstep else None

    @property
    def in_rounds(self) -> bool:
        """Whether all workers take part in every round, and so end and are checkpointed after the same one.

        A checkpoint needs all workers' parts: rounds depend on the number of workers, and workers with the same batches each
        have a part of the model.
        """
        return self.lockstep or self.same_batches

    @property
    def survivors_have_all(self) -> bool:
        """Whether every worker has the whole model and optimizer, so that survivors can write a checkpoint."""
        return self.together and self.needs.kind == "replicated" and not self.splits_update

    @property
    def survivors_continue(self) -> bool:
        """Whether rounds continue without dead workers if a supervisor on one machine reports the deaths."""
        return False

    @property
    def loses_steps(self) -> bool:
        """Whether the steps since the last mean of models are lost with a dead worker, and others train on their batches."""
        return self.survivors_continue and self.gossip

    @property
    def takes_any_workers(self) -> bool:
        """Whether a run can be resumed with more or fewer workers."""
        return not self.lockstep or (self.survivors_continue and self.together and not self.by_speed)

    @property
    def together(self) -> bool:
        """Whether several workers' gradients make one update of one model: they then share its version, and none is stale."""
        return self.lockstep and not self.gossip

    @property
    def by_speed(self) -> bool:
        """Whether batch sizes are proportional to each worker's speed; `Replica.shares` has the sizes."""
        return False

    @property
    def clips_before_the_mean(self) -> bool:
        """Whether loops clip their own gradients before several workers' gradients are averaged."""
        return self.together and not self.averages_in_backward

    @property
    def takes_several_optimizers(self) -> bool:
        """Whether a loop may have several optimizers, as under all methods but those that exchange models by messages."""
        return not self.needs.mailbox or self.needs.kind == "served"

    @property
    def is_coded(self) -> bool:
        """Whether a codec compresses what workers send."""
        return not isinstance(getattr(self, "codec", NoCodec()), NoCodec)

    @property
    def server_rule(self) -> ApplyRule | None:
        """The rule by which servers apply gradients, whose state checkpoints include; None: no servers."""
        return None

    @property
    def splits_update(self) -> bool:
        """Whether a worker makes only a part of the update, and has only that part of the mean gradient and the state."""
        return False

    def closures(self, num_workers: int) -> Closures:
        """How an optimizer's closure is evaluated, as `StepHooks` lists it."""
        if self.needs.kind == "served" or self.same_batches or self.lets_gradients_wait:
            return "once"
        return "on a copy" if num_workers > 1 else "in place"

    @property
    def takes_shards(self) -> bool:
        """Whether a layout may shard parameters over groups of workers: the program averages shards across groups."""
        return False

    def weighting(self, num_workers: int) -> str:
        """The option that scales each gradient separately, which needs a linear optimizer; empty if there is none."""
        return ""

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer], num_workers: int) -> None:
        """Refuses optimizers whose state would be wrong under this algorithm; call it before the first step."""
        check_linear(optimizers, self.weighting(num_workers))
        if num_workers > 1 and self.closures(num_workers) != "in rounds":
            check_no_line_search(optimizers)

    @property
    def lets_gradients_wait(self) -> bool:
        """Whether a gradient can be applied in a later update than its own."""
        return False

    @property
    def notices_deaths(self) -> bool:
        """Whether a worker's death changes updates of others, or of its replacement, at an instant that no record has."""
        return self.lockstep

    def unrecorded(self, num_workers: int) -> str:
        """The decisions of timing that a run's records lack, so that it cannot be replayed; empty if they lack none."""
        if num_workers == 1 or self.same_batches:
            return ""
        if not self.lockstep:
            return "the order in which workers exchanged parameters"
        return "the speeds that the sizes of batches followed" if self.by_speed else ""

    def delayed(self, delay: Delay) -> Algorithm:
        """The same algorithm, whose gradients wait before they are applied.

        Raises:
            UsageError: gradients wait already, or cannot.
        """
        raise UsageError(
            "Staleness cannot be injected into this algorithm: use sequential, or, with several workers, "
            "parameter-server, whose apply= offers the update rules of the other servers."
        )

    def check(self, num_workers: int) -> None:
        """Refuses a number of workers that the algorithm cannot run with."""
        if self.max_workers is not None and num_workers > self.max_workers:
            raise UsageError(
                f"{type(self).__name__.lower()} runs with {self.max_workers} worker, not {num_workers}: use"
                f" --workers {self.max_workers}."
            )

    def check_min_workers(self, min_workers: int, num_workers: int) -> None:
        """Refuses `min_workers` above the run's number of workers, and for methods whose workers do not wait for others."""
        if min_workers > num_workers:
            raise UsageError(f"min_workers={min_workers} is more than the run's {num_workers} workers: lower it.")
        if min_workers > 1 and not (self.survivors_continue and self.needs.collectives):
            raise UsageError(
                "min_workers is for methods in which all workers wait for each other and continue without a dead one, such as"
                " all-reduce: leave it out."
            )

    def work(self, replica: Replica, ports: Ports[Any]) -> None:
        """One worker's program, from its first step to its last; blocking, and the same on every backend."""
        raise TypeError(f"{type(self).__name__} has no worker program")

    def serve(self, shard_id: int, ports: ServerPorts) -> None:
        """One server's program; it ends when all workers have said goodbye and left."""
        raise TypeError(f"{type(self).__name__} has no server program")
