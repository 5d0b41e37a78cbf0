"""Checks of incoming messages. A malformed message counts as its sender's error and never ends the run.

Senders are admitted workers of the run. The checks do not protect against a malicious one: a well-formed message is trusted.
"""

from __future__ import annotations

import math

import torch

from paceline.errors import PacelineError
from paceline.optim.rows import Selection
from paceline.ports.ports import Message, Received

MOST = 1 << 53  # above any count of updates; floats are exact up to here


class MalformedMessageError(PacelineError):
    """A message that no worker of this version sends here. Its receiver counts it, discards it, and continues.

    Attributes:
        sender: the worker that sent it.
    """

    def __init__(self, sender: int, message: Message, what: str) -> None:
        super().__init__(f"Worker {sender} sent a message {message.kind!r} {what}: it was thrown away.")
        self.sender = sender


def checked_vector(received: Received, like: torch.Tensor, selection: Selection | None = None) -> torch.Tensor:
    """The message's vector (n,), which must have the type of `like`, and its length, or as many elements as selected."""
    sender, _, message = received
    x, count = message.x, like.numel() if selection is None else selection.count
    if x is None:
        raise MalformedMessageError(sender, message, "without its vector")
    if x.shape != (count,) or x.dtype != like.dtype:
        what = f"{x.dtype} ({x.numel():,},) where {like.dtype} ({count:,},) is expected"
        raise MalformedMessageError(sender, message, f"with a vector {what}")
    return x


def checked_number(received: Received, number: int, least: int = 0, most: int = MOST) -> int:
    """One of the message's numbers, which must be from `least` to below `most`."""
    if not least <= number < most:
        raise MalformedMessageError(
            received.sender, received.message, f"with {number} where {least} to {most} is expected"
        )
    return number


def checked_weight(received: Received, least: int = 0) -> int:
    """The message's weight, which must be a whole number from `least` to below 2^53."""
    weight = received.message.weight
    if not math.isfinite(weight) or weight != int(weight):
        raise MalformedMessageError(received.sender, received.message, f"with a weight of {weight}")
    return checked_number(received, int(weight), least)
