"""DiLoCo and Streaming DiLoCo: local steps, and an outer optimizer that steps with the mean of the workers' changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch

from paceline.algorithms.fragments import AveragedModels
from paceline.algorithms.merges import OuterStep, Rule, refuse_no_progress
from paceline.compression.codec import Codec, NoCodec
from paceline.compression.registry import check_carrier
from paceline.errors import UsageError
from paceline.optim.outer import Nesterov, Outer
from paceline.specs.bounds import COUNT, COUNT_FROM_0, DECAY


@dataclass(frozen=True, kw_only=True)
class DiLoCo(AveragedModels):
    """DiLoCo: H local steps, then an outer optimizer steps with the mean of all workers' changes, in lockstep.

    With `fragments` and `delay` it is Streaming DiLoCo: fragments of the parameters are sent one after the other, and a
    fragment's outer step is merged `delay` steps after its departure. A merge keeps `local_weight` of a worker's progress
    meanwhile and drops the rest, which leaves 1 - (1 - local_weight) delay / period of it: the result's `progress_factor`.

    If a worker dies on one machine, its steps since the last mean are lost, and the others train on its batches. A
    replacement starts as a copy of the first of them.

    Costs per step: 1/H of an all-reduce of the parameters, overlapped with the computation if there is a delay; on every
    worker the outer parameters and their momentum, and two copies of each fragment under way.
    Clipping acts on the worker's own gradient, before its local step.
    Use when: links are slow, as between sites: with 100 local steps a hundredth of the traffic of all-reduce.
    Not: `local-sgd`, which has no outer optimizer (`outer=sgd(rate=1)`); `da-sgd`, which merges late averages of the models.

    Args:
        period: H, steps between two averages of a fragment.
        outer: the outer optimizer, `sgd` or `nesterov`. Its best rate rises with the number of workers and with H.
        fragments: P, parts that are sent one after the other, H / P steps apart.
        delay: tau, steps from a fragment's departure to its merge, fewer than H / P; `auto` measures a step and an average,
            and takes the smallest delay that hides the average, the same on all workers.
        local_weight: alpha, of the worker's own parameters in the merge.
        codec: compresses the changes, such as `qsgd(bits=4)`: see `all-reduce`. A death then ends the run.

    Differs from the paper: fragments are whole tensors, grouped to similar sizes, as a flat vector has no layers. Changes are
    quantised only by `codec`, and not to 4-bit floats. Evaluation and the final result use the mean of the workers' models:
    right after every merge without a delay that is the outer model; later it includes their local steps. The local optimizer's
    state, such as momentum, stays each worker's own. A single launched worker makes outer steps too, late by a fixed delay;
    `auto` is then 0. Without a launcher a loop is plain PyTorch: the outer optimizer does not run.

    Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, arXiv:2311.08105,
        Algorithm 1; "Streaming DiLoCo with overlapping communication", 2025, arXiv:2501.18512, Algorithm 2.
    """

    period: Annotated[int, COUNT] = 100
    outer: Outer = field(default=Nesterov())
    fragments: Annotated[int, COUNT] = 1
    delay: Annotated[int, COUNT_FROM_0] | Literal["auto"] = 0
    local_weight: Annotated[float, DECAY] = 0.0
    codec: Codec = field(default_factory=NoCodec)

    of_changes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_carrier(self.codec, "all-to-all", "diloco")
        if self.fragments > self.period:
            raise UsageError(
                f"{self.fragments} fragments cannot be sent at different steps of a period of {self.period} steps: "
                f"write fragments={self.period} or less, or a longer period."
            )
        if self.delay != "auto":
            refuse_no_progress(self.progress_factor(self.delay))
            if self.delay > self.most_delay:
                raise UsageError(
                    f"With a delay of {self.delay} steps, an average would still be in transit when the next fragment "
                    f"is sent, every {self.period / self.fragments:.3g} steps: write delay={self.most_delay} or "
                    "less, fewer fragments or a longer period."
                )

    @property
    def most_delay(self) -> int:
        return (self.period - 1) // self.fragments

    def figures(self, delay: int, num_workers: int) -> dict[str, Any]:
        delay = delay if self.delay == "auto" else self.delay
        return {"delay": delay, "progress_factor": self.progress_factor(delay)}

    def rule(self, common: Callable[[], list[torch.Tensor]]) -> Rule:
        return OuterStep(self.outer, self.local_weight, common())
