"""What a message must be before a program uses it. Otherwise it is its sender's error, and never the end of the run.

Its sender has been let in, so it is a worker of the run. This is no defence against one that lies: what has the right form
is taken at its word.
"""

from __future__ import annotations

import math

import torch

from paceline.errors import PacelineError
from paceline.ports.ports import Message, Received

__all__ = ["MOST", "MalformedMessageError", "checked_number", "checked_vector", "checked_weight"]

MOST = 1 << 53  # above any count of updates, and what a float still tells apart


class MalformedMessageError(PacelineError):
    """No worker of this version sends such a message here. Its receiver counts it, throws it away, and goes on.

    Attributes:
        sender: whose error it is.
    """

    def __init__(self, sender: int, message: Message, what: str) -> None:
        super().__init__(f"Worker {sender} sent a message {message.kind!r} {what}: it was thrown away.")
        self.sender = sender


def checked_vector(received: Received, like: torch.Tensor) -> torch.Tensor:
    """Its vector (n,), which must be of the length and type of `like`."""
    sender, _, message = received
    x = message.x
    if x is None:
        raise MalformedMessageError(sender, message, "without its vector")
    if x.shape != like.shape or x.dtype != like.dtype:
        found, expected = (f"{one.dtype} ({one.numel():,},)" for one in (x, like))
        raise MalformedMessageError(sender, message, f"with a vector {found} where {expected} is expected")
    return x


def checked_number(received: Received, number: int, least: int = 0, most: int = MOST) -> int:
    """One of its numbers, which must be from `least` to below `most`."""
    if not least <= number < most:
        raise MalformedMessageError(
            received.sender, received.message, f"with {number} where {least} to {most} is expected"
        )
    return number


def checked_weight(received: Received, least: int = 0) -> int:
    """Its weight, where that is a whole number from `least` to below 2^53."""
    weight = received.message.weight
    if not math.isfinite(weight) or weight != int(weight):
        raise MalformedMessageError(received.sender, received.message, f"with a weight of {weight}")
    return checked_number(received, int(weight), least)
