"""Losses on a mesh: cross entropy over a sharded vocabulary, and gathered outputs for any other loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.model_parallel.tensor.functions import VocabularyLoss, WholeFeatures, apply
from paceline.model_parallel.tensor.mesh import Mesh

__all__ = ["cross_entropy", "whole_features"]


def cross_entropy(logits: Tensor, targets: Tensor, mesh: Mesh) -> Tensor:
    """The mean over the whole batch, the same number on every worker.

    Args:
        logits: (..., vocabulary), cut over the vocabulary, of this worker's part of the batch.
        targets: (...), of that part; each is a token of the whole vocabulary.
        mesh: the workers.
    """
    if mesh.shape.workers == 1:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    return apply(VocabularyLoss, logits, targets, mesh)


def whole_features(x: Tensor, features: int, mesh: Mesh) -> Tensor:
    """Gathers all outputs of a layer, for a loss of several at once, such as PyTorch's cross entropy.

    Costs: an all-gather along the line or the row, and no message in the backward pass; nothing if `x` is whole.

    Args:
        x: (..., features), or this worker's part of the last dimension.
        features: whole.
        mesh: the workers.

    Raises:
        UsageError: it is neither.
    """
    if x.shape[-1] == features:
        return x
    if x.shape[-1] * mesh.hidden.size != features:
        raise UsageError(
            f"{x.shape[-1]} features of {features} are neither all nor this worker's part: give whole_features a layer's"
            " output, and the number of outputs that the layer was built with."
        )
    return apply(WholeFeatures, x, mesh.hidden)
