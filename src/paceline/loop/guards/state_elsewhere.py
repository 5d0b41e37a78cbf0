"""Warns when a loop calls an optimizer's `state_dict` while its state is elsewhere: its checkpoint would lack momentum."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from paceline.algorithms import Algorithm
from paceline.errors import UsageError
from paceline.loop.guards.guard import Guard
from paceline.optim.saved_state import asked_by_run


class StateElsewhere(Guard):
    """Warns when a loop asks its optimizer for state that servers keep, or that the worker has only in part.

    After the `with`, the optimizer still lacks the servers' state until the loop loads a saved one. Loading inside the
    `with` is refused, since it would not reach the servers.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], algorithm: Algorithm) -> None:
        self._handles: list[Any] = []
        rule = algorithm.server_rule
        if rule is not None and not rule.overrides_optimizer:
            self._handles = [handle for one in optimizers for handle in _AtServers(one).handles]
        elif algorithm.splits_update:
            self._handles = [one.register_state_dict_pre_hook(_warn_of_part) for one in optimizers]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _AtServers:
    """An optimizer whose steps the servers make."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._has_warned = False
        self._asked = optimizer.register_state_dict_pre_hook(self._warn)
        self._loaded = optimizer.register_load_state_dict_post_hook(self._forget)
        self.handles = [optimizer.register_load_state_dict_pre_hook(_refuse)]

    def _warn(self, optimizer: torch.optim.Optimizer) -> None:
        if not (self._has_warned or asked_by_run.get()):
            self._has_warned = True
            warnings.warn(
                "The servers keep the optimizer's state, so a checkpoint of optimizer.state_dict() lacks its current "
                "values, such as momentum: give the run a folder (`out`, or --out) and continue it with `resume`, or "
                "load only the model.",
                stacklevel=4,
            )

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        self._asked.remove()
        self._loaded.remove()


def _refuse(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    raise UsageError(
        "The servers keep the optimizer's state, and take the state that the loop has loaded when it attaches: call "
        "optimizer.load_state_dict before `with paceline.attach(...)`."
    )


def _warn_of_part(optimizer: torch.optim.Optimizer) -> None:
    if not asked_by_run.get():
        warnings.warn(
            "Inside the `with`, optimizer.state_dict() of all-reduce(sharded=true) has only the state of this "
            "worker's own part: save it after the `with`, where it is whole.",
            stacklevel=4,
        )
