"""What a dead worker's replacement gets of another worker's loop: optimizer, schedulers, progress, frozen parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.errors import NotReplacedError
from paceline.loop.run_progress import RunProgress
from paceline.loop.schedules import FollowedScheduler, find_schedulers
from paceline.optim.frozen import FrozenParameters
from paceline.optim.saved_state import load_with_own_settings, state_for_checkpoints
from paceline.optim.several_optimizers import members_of
from paceline.ports.newcomers import Refusal


class CarriedState:
    """What newcomers get of this worker's loop, and whether they can get all.

    Schedulers that follow the run catch up by themselves, from the newcomer's own learning rates.

    Args:
        on_progress: what is called before and after every step.
        frozen: the model's; None: newcomers get them otherwise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        on_progress: Sequence[Callable[[], None]],
        frozen: FrozenParameters | None = None,
    ) -> None:
        self._optimizer, self._on_progress, self._frozen = optimizer, on_progress, frozen
        self._prepared: dict[str, Any] | None = None  # schedulers, found before the others wait for this newcomer

    def is_whole(self) -> bool:
        """Whether the schedulers can be told from each other, and all follow the run or none does."""
        followed, own = self._look()
        return len({_name(one) for one in own}) == len(own) and not (own and followed)

    def _look(self) -> tuple[list[Any], list[Any]]:
        """The schedulers that follow the run, and all others; takes 70 ms without an earlier `gc.freeze`."""
        calls = [getattr(one, "__self__", None) for one in self._on_progress]
        followed = [one.scheduler for one in calls if isinstance(one, FollowedScheduler)]
        found = _outermost(self._optimizer)
        return followed, [one for one in found if not any(one is other for other in followed)]

    def prepare(self) -> None:
        """Finds the schedulers for a `take` that follows before the loop goes on."""
        self._prepared = None  # which would keep some that the loop has replaced
        self._prepared = {_name(one): one for one in _outermost(self._optimizer)}

    def state(self, progress: RunProgress | None) -> dict[str, Any]:
        followed, own = self._look()
        return {
            "class": _name(self._optimizer),
            "optimizer": state_for_checkpoints(self._optimizer),
            "schedulers": None if followed else {_name(one): one.state_dict() for one in own},
            "progress": tuple(progress.position) if progress is not None else (0.0, 0.0),
            "frozen": self._frozen.changed() if self._frozen is not None else {},
        }

    def take(self, given: dict[str, Any], progress: RunProgress | None) -> None:
        """Takes over the `state` of another worker's loop.

        Raises:
            NotReplacedError: this loop has another optimizer or other schedulers.
        """
        if progress is not None:
            progress.position = list(given["progress"])
        if given["class"] != _name(self._optimizer):
            raise NotReplacedError(Refusal.OPTIMIZER.why)
        try:
            self._load(given)
        except (KeyError, ValueError) as error:
            raise NotReplacedError(Refusal.OPTIMIZER.why) from error
        if self._frozen is not None:
            self._frozen.begin(given["frozen"])

    def _load(self, given: dict[str, Any]) -> None:
        own, self._prepared = self._prepared, None
        if given["schedulers"] is None:
            load_with_own_settings(self._optimizer, given["optimizer"])
            return
        if own is None:
            own = {_name(one): one for one in _outermost(self._optimizer)}
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
