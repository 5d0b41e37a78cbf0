"""The configuration of `paceline train`, which the CLI, Python and the workers share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from paceline.algorithms import DEFAULT_ALGORITHM, Algorithm, registry
from paceline.algorithms.server.delay import Delay
from paceline.algorithms.server.registries import delay_registry, delay_spec
from paceline.data.plan import BatchPlan, Partition, Skewed, partition_registry
from paceline.errors import UsageError
from paceline.loop.slowness import checked_factors
from paceline.memory.placement import placement_registry
from paceline.model_parallel.layouts import layout_of, layout_registry
from paceline.specs.bounds import check_run
from paceline.specs.goal import Goal
from paceline.specs.registry import build_optimizer
from paceline.specs.types import check_fields
from paceline.tasks.base import Task, targets_of
from paceline.worker.evaluator import about_evaluated


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What to train and how; every field is an option of `paceline train`.

    Args:
        task: built-in name, or `path/to/file.py:function`.
        algorithm: spec.
        workers: number of workers.
        layout: spec: how the model is divided among the workers; None: every worker has all of it.
        backend: "processes" or "threads".
        epochs: passes over the training data, all workers together; fractions allowed.
        steps: instead of epochs: gradients per worker.
        batch_size: samples per gradient; None: the task's.
        learning_rate: None: the algorithm's own default, or the task's.
        momentum: for optimizers that have one.
        optimizer: spec of a torch.optim class.
        optimizer_state: "per-worker", or "shared" by all (one momentum, one Adam step).
        target_loss: stop once the training loss averaged over the last 100 applied batches is at most this.
        target_accuracy: stop once the test accuracy is at least this.
        target_fraction: instead of a target loss: this share of the loss before the first update.
        limit_s: stop after this many seconds of training (virtual seconds in a simulation).
        partition: spec: which worker trains on which samples.
        placement: spec: where the parameters lie, and whether workers are pinned.
        seed: of parameters, order of samples, and everything random in an algorithm.
        data: folder with data sets; None: the one in PACELINE_DATA.
        restarts: how many dead workers are replaced, under methods that tolerate a death.
        min_workers: if fewer than this many workers are left, they wait for replacements; if none comes, the run ends. For
            methods with means of all workers.
        intra_op_threads: threads per worker inside one PyTorch operation.
        slow: by worker, the factor on the time of its gradients, as on a slow machine; None: no slowdown.
        inject_staleness: delay of gradients before they are applied, as a number of updates or a delay's spec; None: no delay.
        staleness_ramp_epochs: number of epochs over which that delay grows from 0 to its full length.
        checkpoint_every_s: at most one checkpoint in this time, at the next epoch's beginning (0: at every epoch); one is
            always written at the end.
    """

    task: str = "digits-mlp"
    algorithm: str = DEFAULT_ALGORITHM
    workers: int = 2
    layout: str | None = None
    backend: str = "processes"
    epochs: float | None = None
    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    momentum: float | None = None
    optimizer: str = "sgd"
    optimizer_state: str = "per-worker"
    target_loss: float | None = None
    target_accuracy: float | None = None
    target_fraction: float | None = None
    limit_s: float | None = None
    partition: str = "dynamic"
    placement: str = "first-touch"
    seed: int = 0
    data: Path | None = None
    restarts: int = 0
    min_workers: int = 1
    intra_op_threads: int = 1
    slow: Mapping[int, float] | None = None
    inject_staleness: int | str | None = None
    staleness_ramp_epochs: float | None = None
    checkpoint_every_s: float = 10.0

    def __post_init__(self) -> None:
        if isinstance(self.data, str):
            object.__setattr__(self, "data", Path(self.data))
        check_fields(self)
        check_run({one.name: getattr(self, one.name) for one in dataclasses.fields(self)})
        if self.epochs is not None and self.steps is not None:
            raise UsageError("Give either epochs or steps, not both.")
        if self.target_loss is not None and self.target_accuracy is not None:
            raise UsageError("Give either a target loss or a target accuracy, not both.")
        if self.target_fraction is not None and (self.target_loss is not None or self.target_accuracy is not None):
            raise UsageError("Give either a target fraction or another target, not both.")
        if self.optimizer_state not in ("per-worker", "shared"):
            raise UsageError(f"Unknown optimizer_state {self.optimizer_state!r}: choose per-worker or shared.")
        if self.slow is not None:  # a file's keys are text
            object.__setattr__(self, "slow", checked_factors(self.slow, self.workers) or None)
        if self.inject_staleness is not None:
            delay_spec(self.inject_staleness)
        if self.staleness_ramp_epochs is not None and self.inject_staleness is None:
            raise UsageError("A staleness ramp needs staleness to inject: add --inject-staleness 20.")

    def identity(self) -> dict[str, Any]:
        keys = ("task", "algorithm", "workers", "backend", "seed", "batch_size")
        return {key: getattr(self, key) for key in keys}

    def goal(self, initial_loss: float | None) -> Goal:
        """The goal that may end the run early; a target fraction is relative to the loss before the first update."""
        target_loss = self.target_loss
        if self.target_fraction is not None and initial_loss is not None and math.isfinite(initial_loss):
            target_loss = self.target_fraction * initial_loss
        return Goal(target_loss=target_loss, target_accuracy=self.target_accuracy, limit_s=self.limit_s)

    @cached_property
    def built_algorithm(self) -> Algorithm:
        """The algorithm, without the delay."""
        return registry.build(self.algorithm)

    def delayed_algorithm(self, plan: BatchPlan | None) -> Algorithm:
        """The algorithm with the configured delay before its updates; without a plan, the run has no data.

        Raises:
            UsageError: the algorithm takes no delay, or the run has no epochs.
        """
        if self.inject_staleness is None:
            return self.built_algorithm
        late: Delay = delay_registry.build(delay_spec(self.inject_staleness))
        if self.staleness_ramp_epochs is not None:
            if late.ramp_updates:
                raise UsageError("The delay already has a ramp: leave out ramp_updates or --staleness-ramp-epochs.")
            if plan is None:
                raise UsageError(
                    "A run without data has no epochs for --staleness-ramp-epochs: give the ramp in updates, as"
                    ' --inject-staleness "constant(updates_late=20, ramp_updates=500)".'
                )
            updates_per_epoch = plan.rounds_per_epoch() if self.built_algorithm.together else plan.batches_per_epoch
            late = dataclasses.replace(late, ramp_updates=round(self.staleness_ramp_epochs * updates_per_epoch))
        return self.built_algorithm.delayed(late)

    def about_task(self, algorithm: Algorithm) -> dict[str, Any]:
        """The first entries of a task's result, for the algorithm with its delay."""
        delay = {name: getattr(self, name) for name in ("inject_staleness", "staleness_ramp_epochs")}
        delay["algorithm_with_delay"] = registry.spec(algorithm)
        is_delayed = self.inject_staleness is not None
        return self.identity() | (delay if is_delayed else {}) | about_evaluated(algorithm)

    def plan(self, train_set: Dataset[Any]) -> BatchPlan:
        """Which worker trains on which samples of the training set; call `resolved` before."""
        assert self.batch_size is not None
        partition: Partition = partition_registry.build(self.partition)
        return BatchPlan(
            num_samples=len(train_set),  # type: ignore[arg-type]
            batch_size=self.batch_size,
            seed=self.seed,
            partition=partition,
            by_speed=self.workers > 1 and self.built_algorithm.by_speed,
            num_workers=self.workers,
            labels=targets_of(train_set) if isinstance(partition, Skewed) else None,
        )

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of a worker; call `resolved` before."""
        assert self.learning_rate is not None
        return build_optimizer(self.optimizer, parameters, self.learning_rate, self.momentum)

    def resolved(self, task: Task) -> TrainConfig:
        """With the task's defaults filled in, and specs in canonical form."""
        epochs = self.epochs if self.epochs is not None or self.steps is not None else task.epochs
        rates = (self.learning_rate, self.built_algorithm.default_learning_rate, task.learning_rate)
        return dataclasses.replace(
            self,
            algorithm=registry.spec(self.built_algorithm),
            partition=partition_registry.spec(partition_registry.build(self.partition)),
            placement=placement_registry.spec(placement_registry.build(self.placement)),
            layout=layout_registry.spec(layout_of(self.layout)) if self.layout else None,
            epochs=epochs,
            batch_size=self.batch_size or task.batch_size,
            learning_rate=next(rate for rate in rates if rate is not None),
            inject_staleness=delay_spec(self.inject_staleness) if self.inject_staleness is not None else None,
        )
