"""Where a gradient comes from, and how old it is; gradients that wait at a shard, and their mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from paceline.optim.half_types import sum_type, to_sum_type
from paceline.optim.ranges import Ranges, within
from paceline.optim.rows import Selection, sum_selected, whole_but

if TYPE_CHECKING:
    from paceline.ports.ports import Message
    from paceline.ports.shared import ServedParameters

# In place of the version that an update became:
DROPPED = -1
COUNTED = 0  # part of a later update; its worker goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateInfo:
    """A gradient's source and age."""

    worker_id: int  # the worker that computed it
    sequence: int  # the worker's own count of its gradients; a repeated number marks a duplicate
    step: int  # the step that the gradient was computed for, as stamped by the worker
    version_read: int  # version of the parameters that it was computed at
    version: int  # version of the parameters now, before it is applied
    num_samples: int  # samples that it is the mean over
    missing: Ranges = ()  # elements of the shard that belong to parameters without a gradient, which make no step
    selection: Selection | None = None  # the elements that the gradient has; None: all
    echo: Tensor | None = None  # what `Applier.read` returned with the parameters that it was computed at

    @property
    def staleness(self) -> int:
        """Updates applied since the parameters were read."""
        return self.version - self.version_read

    def part_of(self, x: Tensor) -> float:
        """The share of a shard's elements (n,) that it changes."""
        return self.selection.count / len(x) if self.selection is not None else 1.0


class WaitingGradient(NamedTuple):
    """A gradient that waits for others, and its source."""

    update: UpdateInfo
    incarnation: int
    gradient: Tensor


class DecidedUpdate(NamedTuple):
    """A worker's last decided update."""

    incarnation: int
    sequence: int
    applied_version: int


def info_of(
    message: Message,
    worker_id: int,
    shared: ServedParameters,
    shard_id: int,
    gradient: Tensor,
    missing: Ranges,
    selection: Selection | None = None,
    echo: Tensor | None = None,
) -> UpdateInfo:
    """Describes a gradient (n,) that a shard has received, and sets it to 0 in the ranges that are `missing`."""
    own = within(missing, *shared.ranges[shard_id]) if selection is None else ()
    for begin, end in own:  # codecs may turn zeros into other values
        if gradient[begin:end].any():
            gradient[begin:end] = 0
    return UpdateInfo(
        worker_id=worker_id,
        sequence=message.number,
        step=message.version,
        version_read=message.version,
        version=shared.version,
        num_samples=int(message.weight),
        missing=own,
        selection=selection,
        echo=echo,
    )


def weighted_mean(ones: list[WaitingGradient], moved: Callable[[float], None]) -> tuple[Tensor, Selection | None]:
    """sum_i n_i g_i / sum_i n_i (P_s,), n_i: samples, in the first gradient's memory; a single gradient keeps its bits.

    Calls `moved` with the number of vectors read and written.

    Returns:
        the mean, and the elements that it has.
    """
    weights = [one.update.num_samples for one in ones]
    mean, selection = ones[0].gradient, ones[0].update.selection
    if len(ones) == 1:
        return mean, selection
    if any(one.update.selection is not None for one in ones):
        parts = [(*_selected(one, ones), float(weight)) for one, weight in zip(ones, weights, strict=True)]
        total, selection = sum_selected(parts, sum_type(mean.dtype))
        moved(3 * sum(part.count for _, part, _ in parts) / max(1, selection.end - selection.begin))
        return total.div_(max(1, sum(weights))).to(mean.dtype), selection
    total = to_sum_type(mean)
    equal = len(set(weights)) == 1
    moved(3 * (len(ones) - 1) + (2 if equal else 4))
    if not equal:
        total.mul_(weights[0])
    for one, weight in zip(ones[1:], weights[1:], strict=True):
        total.add_(one.gradient, alpha=1 if equal else weight)
    total.div_(len(ones) if equal else max(1, sum(weights)))
    return total if total is mean else mean.copy_(total), None


def _selected(one: WaitingGradient, ones: list[WaitingGradient]) -> tuple[Tensor, Selection]:
    """A gradient's values and its selection; a dense one's has all but the parameters without a gradient."""
    if one.update.selection is not None:
        return one.gradient, one.update.selection
    like = next(other.update.selection for other in ones if other.update.selection is not None)
    missing = [(begin + like.begin, end + like.begin) for begin, end in one.update.missing]
    selection = Selection(whole_but(missing), like.begin, like.end)
    return selection.take(one.gradient), selection


def as_one(ones: list[WaitingGradient], version: int, moved: Callable[[float], None]) -> tuple[UpdateInfo, Tensor]:
    """The update that these gradients make at `version`, and their mean; elements missing from all of them are missing.

    Calls `moved` with the number of vectors read and written.
    """
    first, *others = (one.update for one in ones)
    mean, selection = weighted_mean(ones, moved)
    missing = (
        ()
        if selection is not None
        else tuple(own for own in first.missing if all(own in other.missing for other in others))
    )
    num_samples = sum(one.update.num_samples for one in ones)
    return replace(first, version=version, num_samples=num_samples, missing=missing, selection=selection), mean
