"""What a loop has changed of its optimizer's settings since it began, such as a learning rate, after a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["GroupOptions"]

_NOT_OPTIONS = ("params", "initial_lr")


class GroupOptions:
    """An optimizer's settings as a loop begins with them.

    A resumed loop begins at its top and goes through its epochs again, without batches. What it sets by itself until its first
    batch, as a schedule of epochs does, is right already; and who resumes may have chosen other settings. So a setting is
    restored only if the resumed loop has begun with the value that the first run began with, and has not changed it since.

    Not: a scheduler's own count, which is the loop's to keep; `worker.follow` keeps it.
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
