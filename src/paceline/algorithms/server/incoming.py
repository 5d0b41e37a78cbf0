"""Parse and check a shard's incoming messages before they change anything; states of optimizers as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.compression.codec import Codec
from paceline.errors import UsageError
from paceline.optim.ranges import Ranges
from paceline.optim.rows import Selection
from paceline.optim.settings import OptimizerSettings
from paceline.ports.checks import MOST, MalformedMessageError, checked_number, checked_vector, checked_weight
from paceline.ports.ports import Received
from paceline.system.plain_tensors import tensors_from_bytes, tensors_to_bytes

_FROM_WORKERS = frozenset(
    (
        *("push", "push-only", "settings", "state", "echo", "join", "bye", "fetch", "final", "clock", "save", "meet"),
        *("rows", "lookup", "tables"),
    )
)
_COUNTED = frozenset(("push", "push-only", "join", "clock", "choice", "save", "rows"))  # whose number is a count


def check_form(received: Received, num_workers: int) -> None:
    """Checks that the sender may send this kind of message, with these numbers; raises MalformedMessageError if it may not."""
    sender, _, message = received
    if message.kind in _FROM_WORKERS and sender >= num_workers:
        raise MalformedMessageError(sender, message, "which only workers send")
    if message.kind == "choice" and sender != num_workers:
        raise MalformedMessageError(sender, message, "which only the first shard's server sends")
    if message.kind in _COUNTED:
        checked_number(received, message.number, 1 if message.kind in ("push", "push-only") else 0)
    if message.kind in ("rows", "fetch"):
        checked_weight(received, least=-1)
    checked_number(received, message.version)


def read_gradient(received: Received, codec: Codec, x: Tensor, selection: Selection | None = None) -> Tensor:
    """The gradient (n,) of a push, for a shard whose parameters are `x` (n,), or its selected elements (count,).

    Empty if only time is simulated.

    Raises:
        MalformedMessageError: the vector is missing, is not of this codec, or has an invalid number of samples.
    """
    sender, _, message = received
    checked_weight(received)
    if message.x is None:
        raise MalformedMessageError(sender, message, "without its vector")
    if not x.numel() and not message.x.numel():
        return message.x
    if selection is not None:
        return checked_vector(received, x, selection)
    try:
        return codec.decode(message.x, len(x), x.dtype)
    except ValueError as error:
        raise MalformedMessageError(sender, message, f"with a wrong vector ({error})") from None


def read_choice(received: Received, num_workers: int) -> tuple[int, ...]:
    """The workers of a choice; raises MalformedMessageError if an id is invalid or occurs twice."""
    sender, _, message = received
    x = message.x
    if x is None or x.dtype != torch.int64 or x.numel() > num_workers:
        raise MalformedMessageError(sender, message, "without workers' ids")
    workers = tuple(x.tolist())
    if not all(0 <= one < num_workers for one in workers) or len(set(workers)) < len(workers):
        raise MalformedMessageError(sender, message, "with ids that belong to no worker")
    return workers


def read_settings(received: Received, known: dict[int, OptimizerSettings], ranges: Ranges) -> OptimizerSettings:
    """An optimizer's settings, beside the workers' earlier ones; `ranges` are empty if only time is simulated.

    Raises:
        MalformedMessageError: they are invalid, or of another optimizer than this worker's last.
        UsageError: they are of another optimizer than the other workers', or of one that this process cannot import.
    """
    sender, _, message = received
    try:
        if message.x is None or message.x.dtype != torch.uint8:
            raise ValueError("no bytes")
        settings = OptimizerSettings.from_tensor(message.x)
        settings.check(ranges[-1][1] or MOST)
    except UsageError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise MalformedMessageError(
            sender, message, f"with bytes that do not describe an optimizer ({error})"
        ) from None
    others = known.get(sender) or next(iter(known.values()), settings)
    if (settings.name, len(settings.groups)) != (others.name, len(others.groups)):
        if sender in known:
            raise MalformedMessageError(sender, message, "of another optimizer than its last")
        raise UsageError(
            f"The workers have different optimizers: {others.name} with {len(others.groups)} groups, and {settings.name} with"
            f" {len(settings.groups)}."
        )
    return settings


def read_state(received: Received, x: Tensor) -> dict[str, Tensor]:
    """An optimizer's state from a worker's message; raises MalformedMessageError if it is not a state of this shard."""
    sender, _, message = received
    try:
        if message.x is None or message.x.dtype != torch.uint8:
            raise ValueError("no bytes")
        return state_from_bytes(message.x, x)
    except ValueError as error:
        raise MalformedMessageError(sender, message, f"with an invalid optimizer state ({error})") from None


def state_to_bytes(state: dict[str, Tensor], elements: tuple[int, int]) -> Tensor:
    """A shard's `elements` of vectors (P,), and numbers, as bytes."""
    own = {key: value[slice(*elements)] if value.dim() else value for key, value in state.items()}
    return torch.frombuffer(tensors_to_bytes(own), dtype=torch.uint8)


def state_from_bytes(sent: Tensor, x: Tensor) -> dict[str, Tensor]:
    """The inverse of `state_to_bytes`, for a shard whose parameters are `x` (n,).

    Raises:
        ValueError: the bytes are malformed, or another shard's.
    """
    state = tensors_from_bytes(sent.numpy().tobytes())
    for key, value in state.items():
        if value.shape not in ((), x.shape):
            raise ValueError(f"{key!r}, which does not fit {len(x):,} parameters")
    return {key: value.to(x.device) for key, value in state.items()}
