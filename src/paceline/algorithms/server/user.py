"""The user's own optimizer, applied by the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.algorithms.server.apply import Applier, ApplyRule
from paceline.algorithms.server.update import UpdateInfo
from paceline.optim.flat_optimizer import FlatOptimizer
from paceline.optim.settings import OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class UserOptimizer(ApplyRule):
    """The workers' own optimizer, at their schedulers' current rates.

    The workers send its class and its groups' settings, once and whenever they change. So it must be an element-wise optimizer
    of torch, such as SGD, Adam, AdamW, RMSprop or Adagrad. The server keeps its state, which starts with the state that the
    workers have loaded into theirs.
    """

    is_linear: ClassVar[bool] = True

    @property
    def overrides_optimizer(self) -> bool:
        return False

    def start(self, num_elements: int, dtype: torch.dtype) -> UserApplier:
        return UserApplier()


class UserApplier(Applier):
    """Applies the user's optimizer; set its attributes before `apply`."""

    copies_state: ClassVar[bool] = True
    leaves_out: ClassVar[bool] = True
    takes_selection: ClassVar[bool] = True  # as PyTorch's optimizers take sparse gradients

    def __init__(self) -> None:
        super().__init__()
        self.begin = 0  # where the shard begins in the flat vector
        self.settings: OptimizerSettings | None = None  # of the update's worker
        self.scale = 1.0  # factor on every group's learning rate
        self._optimizer: FlatOptimizer | None = None
        self._loaded: dict[str, Tensor] = {}

    def apply(self, x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float) -> None:
        """One step of the optimizer at its groups' own rates; skips elements without a gradient."""
        assert self.settings is not None
        if self._optimizer is None:
            self._optimizer = FlatOptimizer(self.settings, x, self.begin)
            self._optimizer.load(self._loaded)
            self._loaded = {}
        self._optimizer.step(gradient, self.settings, self.scale, info.missing, info.selection)

    def state(self) -> dict[str, Tensor]:
        return self._optimizer.state() if self._optimizer is not None else dict(self._loaded)

    def begin_with(self, state: dict[str, Tensor]) -> None:
        """Starts the optimizer with a worker's loaded state, unless it has started or has one already."""
        if self._optimizer is None and not self._loaded:
            self._loaded = state

    def load(self, state: dict[str, Tensor]) -> None:
        self._loaded, self._optimizer = dict(state), None
