"""Local SGD: workers train independently and average their parameters every H steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import torch

from paceline.algorithms.base import Closures
from paceline.algorithms.fragments import AveragedModels
from paceline.algorithms.merges import MeanOfModels, Rule, rule_of_models
from paceline.compression.codec import Codec, NoCodec
from paceline.compression.registry import check_carrier
from paceline.specs.bounds import COUNT, COUNT_FROM_0


@dataclass(frozen=True, kw_only=True)
class LocalSGD(AveragedModels):
    """Local SGD: each worker takes H steps on its own model, then all average their models, in lockstep.

    If a worker dies on one machine, its steps since the last mean are lost, and the others train on its batches. A
    replacement starts as a copy of the first of them.

    Costs per step: 1/H of an all-reduce of the parameters. Every H steps all wait for the slowest.
    Clipping acts on the worker's own gradient, before its local step; during warm-up, before the mean.
    Use when: workers are equally fast and communication is the bottleneck.
    Not: `lockstep` and `all-reduce`, which average every gradient; `ad-psgd`, which never waits. DiLoCo is local SGD with an
    outer optimizer on the averaged change.

    Args:
        period: H, steps between two averages of the parameters.
        warmup_steps: number of first steps that average every gradient instead, as all-reduce does: post-local SGD.
        codec: compresses the changes since the last average, such as `qsgd(bits=4)`: see `all-reduce`. A death then
            ends the run.

    Differs from the paper: the optimizer's state, such as momentum, stays each worker's own and is not averaged.

    Reference: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, arXiv:1808.07217; the warm-up is theirs and
        PyTorch's `PostLocalSGDState`.
    """

    period: Annotated[int, COUNT] = 8
    warmup_steps: Annotated[int, COUNT_FROM_0] = 0
    codec: Codec = field(default_factory=NoCodec)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_carrier(self.codec, "all-to-all", "local-sgd")

    @property
    def clips_before_the_mean(self) -> bool:
        return self.warmup_steps > 0

    def closures(self, num_workers: int) -> Closures:
        """A warm-up averages one gradient per step."""
        return "once" if self.warmup_steps and num_workers > 1 else super().closures(num_workers)

    def rule(self, common: Callable[[], list[torch.Tensor]]) -> Rule:
        return rule_of_models(MeanOfModels(), self.codec, common)
