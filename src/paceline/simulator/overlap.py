"""How a simulated gradient is sent in buckets while the rest of it is still being computed."""

from __future__ import annotations

from collections.abc import Sequence

FORWARD_SHARE = 1 / 3


def shares_until_complete(bucket_sizes: Sequence[float]) -> list[float]:
    """The shares of a step's forward and backward between the completion of one bucket and the next; they add up to 1.

    Assumes that the forward pass takes a third of the time and completes nothing, and that the backward pass takes equally
    long for each element of the parameters. Matrix products behave like this: forward has one, and backward two of the same
    size, for the gradients of the weights and of the inputs. The first layers of a convolutional network compute more per
    element, and their gradients come last: its buckets complete sooner than modelled, so it hides more communication.

    >>> [round(one, 3) for one in shares_until_complete([300, 100])]
    [0.833, 0.167]

    Args:
        bucket_sizes: in any unit, in the order in which the buckets leave.

    Reference: Das et al., "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent", 2016, arXiv:1602.06709:
        forward propagation, back-propagation and weight gradient cost the same.
    """
    backward = (1 - FORWARD_SHARE) / sum(bucket_sizes)
    shares = [backward * size for size in bucket_sizes]
    shares[0] += FORWARD_SHARE
    return shares


def declared_buckets(vector_bytes: int, bucket_bytes: int) -> list[int]:
    """Bucket sizes of a vector whose parameters are not known: full buckets and the remainder.

    >>> declared_buckets(100, 40)
    [40, 40, 20]
    """
    full, rest = divmod(vector_bytes, bucket_bytes)
    return [bucket_bytes] * full + [rest] * bool(rest)
