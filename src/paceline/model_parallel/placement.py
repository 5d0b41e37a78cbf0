"""The parts of a whole tensor on a mesh, and the axes along which its gradients are partial sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.axes import Axis


@dataclass(frozen=True)
class Placement:
    """How a parameter lies on a mesh.

    Args:
        averaged: axes along which each worker's gradient is of its own samples only, so that the parameter's is the mean.
            Along any other axis that cuts nothing, parameter and gradient are the same on all workers.
    """

    cuts: tuple[tuple[int, str], ...] = ()  # (dimension, axis): that dimension is cut into equal parts along that axis
    averaged: tuple[str, ...] = ()

    def cut(self, whole: Tensor, axes: Mapping[str, Axis], what: str = "a tensor's dimension") -> Tensor:
        """This worker's part, a view; raises UsageError if a dimension does not divide."""
        for dimension, axis in self.cuts:
            whole = part_of(whole, axes[axis], dimension, what)
        return whole

    def gather(self, local: Tensor, axes: Mapping[str, Axis]) -> Tensor:
        """The whole tensor, on every worker; all workers call it together."""
        for dimension, axis in self.cuts:
            local = torch.cat(axes[axis].all_gather(local).unbind(), dim=dimension)
        return local

    def is_counted(self, axes: Mapping[str, Axis]) -> bool:
        """Whether this worker is the one that counts, among those that have the same part."""
        cut_along = {axis for _, axis in self.cuts}
        return all(axis.index == 0 for name, axis in axes.items() if name not in cut_along)


@torch.no_grad()
def clip_to_norm(
    placed: Sequence[tuple[nn.Parameter, Placement]], axes: Mapping[str, Axis], everybody: Axis, max_norm: float
) -> Tensor:
    """Clips parameters' gradients to a norm of at most `max_norm` over all workers that share a model.

    Returns the norm before. Each element counts once. Workers have different parts along `axes`; `everybody` is the axis of
    all of them.
    """
    total = torch.zeros((), dtype=torch.float64, device=placed[0][0].device if placed else None)
    for parameter, placement in placed:
        if parameter.grad is not None and placement.is_counted(axes):
            total += parameter.grad.double().square().sum()
    everybody.start_all_reduce(total).wait()
    norm = total.sqrt()
    torch.nn.utils.clip_grads_with_norm_((parameter for parameter, _ in placed), max_norm, norm)
    return norm


def part_of(whole: Tensor, axis: Axis, dimension: int, what: str = "a tensor's dimension") -> Tensor:
    """This worker's part of a dimension, a view."""
    size = divided(whole.shape[dimension], axis.size, what)
    return whole.narrow(dimension, axis.index * size, size)


def divided(size: int, parts: int, what: str) -> int:
    """The size of each part; raises UsageError unless `parts` divides `size`."""
    if size % parts:
        raise UsageError(
            f"{what[0].upper()}{what[1:]} of {size} cannot be cut into {parts} equal parts: choose a multiple of {parts}, or"
            " another mesh."
        )
    return size // parts
