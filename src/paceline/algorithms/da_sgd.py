"""DaSGD: local SGD whose average arrives some steps after it started, while the workers keep training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch

from paceline.algorithms.fragments import AveragedModels
from paceline.algorithms.merges import MeanOfModels, Merge, Rule, refuse_no_progress, rule_of_models
from paceline.compression.codec import Codec, NoCodec
from paceline.compression.registry import check_carrier
from paceline.errors import UsageError
from paceline.specs.bounds import COUNT, COUNT_FROM_0, DECAY

_DEFAULT_WEIGHT = 0.25


@dataclass(frozen=True, kw_only=True)
class DaSGD(AveragedModels):
    """DaSGD: every H steps an average of the models starts; it is merged `delay` steps later, in lockstep, without blocking.

    With `merge=paper` a merge keeps `local_weight` of a worker's progress during the delay and drops the rest, so that
    1 - (1 - local_weight) delay / period of its steps count, 0.81 by default: the result's `progress_factor`. The learning
    rate is divided by it to compensate, unless `compensate=false`. The other merges drop nothing.

    If a worker dies on one machine, its steps since the last mean are lost, and the others train on its batches. A
    replacement starts as a copy of the first of them.

    Costs per step: 1/H of an all-reduce of the parameters, overlapped with the computation of `delay` steps; two more copies
    of the parameters while it runs. Shared memory hides nothing: the cores that compute also add up.
    Clipping acts on the worker's own gradient, before its local step.
    Use when: as `local-sgd`, and waiting for the average dominates the cost.
    Not: `local-sgd`, where all wait for the average (`delay=0, local_weight=0`); `diloco`, which steps with an outer optimizer
    on the averaged change. CoCoD-SGD is `merge=cocod` with a delay of a whole period.

    Args:
        period: H, steps between two averages.
        delay: d, steps from the snapshot to the merge, at most a period; `auto` measures a step and an average, and takes the
            smallest delay that hides the average, the same on all workers.
        local_weight: xi, of the worker's own parameters in the merge; small if workers' data differ. `cocod` has none.
        merge: `paper`: x = xi x + (1 - xi) mean; `corrected`: x = x + (1 - xi) (mean - snapshot);
            `cocod`: x = mean + (x - snapshot).
        compensate: whether to divide the learning rate by the progress factor.
        codec: compresses the changes since the last average, such as `qsgd(bits=4)`: see `all-reduce`. A death then
            ends the run.

    Differs from the paper: the paper does not divide the learning rate (`compensate=false`). The workers' models are averaged
    at the end; BatchNorm's statistics are worker 0's. With delay 0 every worker merges; in the authors' code only the last
    one does. A lone worker trains as plain PyTorch: its result has the delay 0 and the progress factor 1.

    Reference: Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging",
        2020, arXiv:2006.00441; `cocod`: Shen et al., "Faster Distributed Deep Net Training: Computation and Communication
        Decoupled Stochastic Gradient Descent", 2019, arXiv:1906.12043.
    """

    period: Annotated[int, COUNT] = 4
    delay: Annotated[int, COUNT_FROM_0] | Literal["auto"] = 1
    local_weight: Annotated[float, DECAY] = _DEFAULT_WEIGHT
    merge: Merge = "paper"
    compensate: bool = True
    codec: Codec = field(default_factory=NoCodec)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_carrier(self.codec, "all-to-all", "da-sgd")
        if self.delay != "auto" and self.delay > self.period:
            raise UsageError(
                f"A delay of {self.delay} steps is above the period of {self.period}, so the next average would be "
                f"sent before the last one is merged: write delay={self.period} or less, or a longer period."
            )
        if self.merge == "cocod" and self.local_weight not in (0, _DEFAULT_WEIGHT):
            raise UsageError(
                "merge=cocod always merges the whole mean: leave out local_weight, or write merge=corrected."
            )
        if self.delay != "auto":
            refuse_no_progress(self.progress_factor(self.delay))

    def progress_factor(self, delay: int) -> float:
        return super().progress_factor(delay) if self.merge == "paper" else 1.0

    def rate_factor(self, delay: int) -> float:
        return 1 / self.progress_factor(delay) if self.compensate else 1.0

    def caution(self, num_workers: int, delay: int | None = None) -> str:
        """A lone worker merges nothing."""
        return super().caution(num_workers, delay) if num_workers > 1 else ""

    def figures(self, delay: int, num_workers: int) -> dict[str, Any]:
        delay = 0 if num_workers == 1 else delay if self.delay == "auto" else self.delay
        return {
            "delay": delay,
            "progress_factor": self.progress_factor(delay),
            "rate_factor": self.rate_factor(delay),
        }

    @property
    def most_delay(self) -> int:
        return self.period if self.progress_factor(self.period) else self.period - 1

    def rule(self, common: Callable[[], list[torch.Tensor]]) -> Rule:
        return rule_of_models(MeanOfModels(self.merge, self.local_weight), self.codec, common)
