"""Half types (bfloat16, float16): sums and averages over workers are computed in float32 and rounded once, at the end.

In bfloat16 the mean of 16 equal models would be off by 1.7 %, and float16 sums overflow at 65,504.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type for sums of `dtype`: float32 for half types, which it holds exactly; else their own.

    >>> sum_type(torch.bfloat16), sum_type(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def to_sum_type(x: torch.Tensor) -> torch.Tensor:
    """`x` (n,) to add others to: a float32 copy of half types, `x` itself of all others."""
    return x.to(sum_type(x.dtype))


def add_up(vectors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """`out` (n,) becomes the sum of `vectors` (n,), added up in their order."""
    first, *others = vectors
    total = to_sum_type(out)
    if others and total is out:
        torch.add(first, others.pop(0), out=out)  # one pass instead of two
    else:
        total.copy_(first)
    for vector in others:
        total.add_(vector)
    if total is not out:
        out.copy_(total)


def mean_into(total: torch.Tensor, weighted: Sequence[tuple[torch.Tensor, float]]) -> None:
    """`total` (n,) becomes the weighted mean sum_k (w_k / w_1) x_k / sum_k (w_k / w_1), added up in its type, in their order.

    No vectors give zero; a single vector is copied bit for bit.
    """
    if not weighted:
        total.zero_()
        return
    (first, unit), *others = weighted
    left = list(others)
    if left and first.dtype == total.dtype:
        x, weight = left.pop(0)
        torch.add(first, x, alpha=weight / unit, out=total)  # one pass instead of two
    else:
        total.copy_(first)
    for x, weight in left:
        total.add_(x, alpha=weight / unit)
    if others:
        total.div_(sum(weight / unit for _, weight in weighted))


def is_finite(x: torch.Tensor) -> bool:
    """Whether no element of `x` is infinite or NaN.

    Checks the smallest and the largest element, which are NaN if any element is. Takes as long as a sum, which could overflow;
    `isfinite().all()` takes about 15 times as long.
    """
    return all(map(math.isfinite, torch.stack(torch.aminmax(x)).tolist()))
