"""How a simulated gradient leaves in buckets while the rest of it is still being computed."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["FORWARD_SHARE", "declared_buckets", "shares_until_complete"]

FORWARD_SHARE = 1 / 3


def shares_until_complete(bucket_sizes: Sequence[float]) -> list[float]:
    """Which share of a step's forward and backward is computed between two buckets' completion; they add up to 1.

    Assumed: first the forward pass, a third of the time, in which nothing is complete; then the backward pass, which takes as
    long for each element of the parameters. So it is for matrix products: forward has one for each, backward two of the same
    size, for the weights' gradients and for the inputs'. Convolutions compute more for each element in their first layers,
    whose gradients come last: of such a network more is complete sooner than this says, and more of its messages are hidden.

    >>> [round(one, 3) for one in shares_until_complete([300, 100])]
    [0.833, 0.167]

    Args:
        bucket_sizes: in whatever unit, in the order in which they leave.

    Reference: Das et al., "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent", 2016, arXiv:1602.06709:
        forward propagation, back-propagation and weight gradient cost as much each.
    """
    backward = (1 - FORWARD_SHARE) / sum(bucket_sizes)
    shares = [backward * size for size in bucket_sizes]
    shares[0] += FORWARD_SHARE
    return shares


def declared_buckets(vector_bytes: int, bucket_bytes: int) -> list[int]:
    """Sizes of the buckets of a vector whose parameters are not known: full ones, and what is left.

    >>> declared_buckets(100, 40)
    [40, 40, 20]
    """
    full, rest = divmod(vector_bytes, bucket_bytes)
    return [bucket_bytes] * full + [rest] * bool(rest)
