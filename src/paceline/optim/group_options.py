"""Restore the optimizer settings, such as a learning rate, that a loop had changed before a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_NOT_OPTIONS = ("params", "initial_lr")


class GroupOptions:
    """An optimizer's settings at the start of a loop.

    A resumed loop starts at its top and repeats its epochs without batches. Settings that it changes before its first batch,
    as an epoch schedule does, are right already; and the user may resume with other settings. So a setting is restored only if
    the resumed loop began with the same value as the first run, and has not changed it since.

    Not: a scheduler's own count, which the loop must keep; `worker.follow` keeps it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer, self._names = optimizer, dict(names)
        self.began = [_options(group) for group in optimizer.param_groups]

    def restore(self, saved: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
        """Sets what the run had changed; called at the resumed loop's first batch.

        Args:
            saved: by parameter, the settings that its group began with, and those that it had at the checkpoint.
        """
        for group, own in zip(self._optimizer.param_groups, self.began, strict=True):
            known = (self._names.get(id(one), "") for one in group["params"])
            began, last = next((saved[name] for name in known if name in saved), ({}, {}))
            now = _options(group)
            for key in own.keys() & began.keys() & last.keys():
                if _plain(began[key]) == own[key] == now.get(key) != _plain(last[key]):
                    group[key] = _like(group[key], _plain(last[key]))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in group.items() if key not in _NOT_OPTIONS}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else tuple(value.flatten().tolist())
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _like(now: Any, value: Any) -> Any:
    if isinstance(now, torch.Tensor):
        return torch.full_like(now, value)
    return list(value) if isinstance(now, list) else value
