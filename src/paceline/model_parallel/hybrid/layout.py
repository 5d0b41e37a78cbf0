"""The layout that shards fully connected layers over groups of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from paceline.errors import UsageError
from paceline.specs.bounds import COUNT
from paceline.specs.types import check_fields


@dataclass(frozen=True, kw_only=True)
class HybridParallel:
    """Fully connected layers cut over groups of workers, everything else data-parallel.

    N workers form G groups of N / G. Each large `nn.Linear` is cut over the workers of its group. Across groups, the workers
    that hold the same part average its gradient; all workers average the gradients of the other parameters. Workers of a group
    gather their activations before a cut layer, and reduce-scatter the activations' gradients in the backward pass. For every
    G, the result is that of one process with all workers' samples as one batch.

    Costs per step: instead of a cut layer's weights, its inputs for the group's batch are sent, twice. Each of these
    operations waits for the slowest worker of its group, and none overlaps with computation. Each worker holds 1 / (N / G)
    of a cut layer, of its gradient and of its optimizer state.
    Use when: fully connected layers hold most weights and batches are small, as in VGG: `paceline advise layers` says where
    fewer bytes travel. Not: for models without such layers, or for workers on one machine, where averaging is cheap; nor
    for Megatron's tensor parallelism, which cuts attention.

    Args:
        groups: G, which divides the number of workers N: with G = N nothing is cut, with G = 1 all workers share one model.
            `auto`: the number that the chooser of `paceline advise layers` finds fastest.
        pairing: of two cut layers with only element-wise modules between them. `gather`, as published: activations are
            gathered before each. `column-row`: the first is cut by outputs, the second by inputs, so that only the second's
            outputs are summed.
        layers: names of the linear layers to cut, with - between them; empty: all with `min_weights` or more that divide.
        min_weights: smaller layers are not worth an exchange of activations.

    Differs from the paper: a group's strip of a gradient is averaged by all-reduce, which combines part-reduce and
    part-broadcast, and no worker updates others' strips.

    Reference: Das et al., "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent", 2016, arXiv:1602.06709,
        section 3.
    """

    groups: Annotated[int, COUNT] | Literal["auto"] = "auto"
    pairing: Literal["gather", "column-row"] = "gather"
    layers: str = ""
    min_weights: Annotated[int, COUNT] = 65_536

    worker_kind: ClassVar[str] = "paceline.model_parallel.sharded_worker:ShardedWorker"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, self.layers.split("-")))

    def parts(self, num_workers: int) -> int:
        """Workers of a group.

        Raises:
            UsageError: the groups would be of different sizes, or their number is not chosen yet.
        """
        if self.groups == "auto":
            raise UsageError(
                "hybrid(groups=auto) needs the sizes of layers and batches to choose groups: give attach "
                "example_inputs=x, an example of a worker's batch, or say groups=2."
            )
        if num_workers % self.groups:
            divisors = [str(n) for n in range(1, num_workers + 1) if num_workers % n == 0]
            raise UsageError(
                f"{num_workers} workers cannot form {self.groups} groups of equal size: use "
                f"groups={' or '.join(divisors)}."
            )
        return num_workers // self.groups
