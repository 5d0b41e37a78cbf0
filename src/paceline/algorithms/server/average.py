"""Exponential moving average of parameters, for evaluation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from paceline.optim.half_types import sum_type
from paceline.system.saved_state import check_fits

if TYPE_CHECKING:
    from paceline.ports.ports import Ports
    from paceline.ports.shared import AveragedParameters, WritableParameters

_PREFIX = "average."  # in a snapshot


class MovingAverage:
    """average <- decay average + (1 - decay) x after every update, starting from the initial x.

    Evaluating the average instead of the parameters reduces the noise of many workers. BatchNorm's statistics need their own
    average, with the same decay: the newest statistics do not fit an averaged model.

    Args:
        x: first value (P,), copied.
        decay: share of the old average that is kept.
        at: memory for the average (P,); None: its own. For half types it is float32: they cannot add a thousandth.
        warm_up: limits the decay to (1 + n) / (10 + n) at the n-th update, so that short runs do not evaluate their start.

    Reference: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981. The warm-up is TensorFlow's.
    """

    def __init__(self, x: Tensor, decay: float = 0.9999, *, at: Tensor | None = None, warm_up: bool = True) -> None:
        if not (0 <= decay < 1 and math.isfinite(decay)):
            raise ValueError(f"decay must be at least 0 and below 1, not {decay}")
        self.x = x.detach().to(sum_type(x.dtype), copy=True) if at is None else at.copy_(x)
        self._decay, self._warm_up = decay, warm_up
        self.updates = torch.zeros((), dtype=torch.int64)

    def update(self, x: Tensor) -> None:
        """Adds the parameters (P,) after an update."""
        n = int(self.updates.add_(1))
        decay = min(self._decay, (1 + n) / (10 + n)) if self._warm_up else self._decay
        self.x.lerp_(x.detach().to(self.x.dtype), 1 - decay)


class SharedAverage:
    """The moving averages of a shard's part of the vector and, at the first shard, of the model's buffers."""

    def __init__(self, ports: Ports[WritableParameters], decay: float, *, with_buffers: bool) -> None:
        shared = cast("AveragedParameters", ports.shared)  # as `Needs.averaged` asks for
        self._moved = ports.moved
        pairs = [(shared.x, shared.average), *(shared.buffers if with_buffers else ())]
        self._sources = [source for source, _ in pairs]
        self._averages = [MovingAverage(source, decay, at=average) for source, average in pairs]

    def update(self) -> None:
        self._moved(3)
        for average, source in zip(self._averages, self._sources, strict=True):
            average.update(source)

    def state(self) -> dict[str, Tensor]:
        """The live tensors of a snapshot, (n,) for the shard's elements and (1, m) for a buffer's, beside a rule's state."""
        state = {}
        for place, average in enumerate(self._averages):
            x = average.x.reshape(1, -1) if place else average.x
            state |= {f"{_PREFIX}{place}.x": x, f"{_PREFIX}{place}.updates": average.updates}
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        """Restores a snapshot by copy; does nothing if the run had no average."""
        own = self.state()
        found = {name: state[name] for name in own if name in state}
        if found:
            check_fits(found, own, "the moving average")
            for place, average in enumerate(self._averages):
                average.x.copy_(state[f"{_PREFIX}{place}.x"].reshape(average.x.shape))
                average.updates.copy_(state[f"{_PREFIX}{place}.updates"])


def without_average(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rule's own part of a snapshot."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(_PREFIX)}
