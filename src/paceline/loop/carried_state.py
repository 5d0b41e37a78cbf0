"""What a dead worker's replacement gets of another worker's loop: optimizer, schedulers, progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.errors import NotReplacedError
from paceline.loop.run_progress import RunProgress
from paceline.loop.schedules import FollowedScheduler, find_schedulers
from paceline.optim.saved_state import load_with_own_settings, state_for_checkpoints
from paceline.optim.several_optimizers import members_of
from paceline.ports.newcomers import Refusal


class CarriedState:
    """What newcomers get of this worker's loop, and whether they can get all.

    Schedulers that follow the run catch up by themselves, from the newcomer's own learning rates.

    Args:
        optimizer: the loop's.
        on_progress: what is called before and after every step.

    Attributes:
        is_whole: whether the schedulers can be told from each other, and all follow the run or none does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, on_progress: Sequence[Callable[[], None]]) -> None:
        self._optimizer, self._on_progress = optimizer, on_progress
        self._followed: list[Any] = []
        self._own: dict[str, Any] | None = None  # the other schedulers; None: `look` has not been called
        self.is_whole = False

    def look(self) -> None:
        """Finds the schedulers; takes some 70 ms in a process that has not frozen its objects."""
        calls = [getattr(one, "__self__", None) for one in self._on_progress]
        self._followed = [one.scheduler for one in calls if isinstance(one, FollowedScheduler)]
        found = _outermost(self._optimizer)
        own = [one for one in found if not any(one is other for other in self._followed)]
        self._own = {_name(one): one for one in own}
        self.is_whole = len(self._own) == len(own) and not (own and self._followed)

    def _found(self) -> dict[str, Any]:
        """The schedulers that do not follow the run, as `look` has found them; the next call looks again."""
        if self._own is None:
            self.look()
        own, self._own = self._own, None
        assert own is not None
        return own

    def state(self, progress: RunProgress | None) -> dict[str, Any]:
        """For `take`."""
        schedulers = {name: one.state_dict() for name, one in self._found().items()}
        return {
            "class": _name(self._optimizer),
            "optimizer": state_for_checkpoints(self._optimizer),
            "schedulers": None if self._followed else schedulers,
            "progress": progress.position if progress is not None else (0.0, 0.0),
        }

    def take(self, given: dict[str, Any], progress: RunProgress | None) -> None:
        """Takes over the `state` of another worker's loop.

        Raises:
            NotReplacedError: this loop has another optimizer or other schedulers.
        """
        if progress is not None:
            progress.position = given["progress"]
        if given["class"] != _name(self._optimizer):
            raise NotReplacedError(Refusal.OPTIMIZER.why)
        try:
            self._load(given)
        except (KeyError, ValueError) as error:
            raise NotReplacedError(Refusal.OPTIMIZER.why) from error

    def _load(self, given: dict[str, Any]) -> None:
        if given["schedulers"] is None:
            load_with_own_settings(self._optimizer, given["optimizer"])
            return
        own = self._found() | {_name(one): one for one in self._followed}
        if own.keys() != given["schedulers"].keys():
            raise NotReplacedError(Refusal.SCHEDULES.why)
        for name, state in given["schedulers"].items():
            own[name].load_state_dict(state)
        self._optimizer.load_state_dict(given["optimizer"])


def _name(one: Any) -> str:
    return type(one).__qualname__


def _outermost(optimizer: torch.optim.Optimizer) -> list[Any]:
    """An optimizer's schedulers, without those that are parts of others."""
    found = find_schedulers(members_of(optimizer))
    parts = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    return [one for one in found if id(one) not in parts]
