"""A loader's batches as the user's loop iterates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import length_hint
from typing import Any

import torch

from paceline.data.wrappers import telling_end
from paceline.transport.device import moving_to


class Batches:
    """A loader's batches for one worker: each iteration is the run's next epoch, also after a `break`.

    In lockstep every worker gets as many batches as the one with the most: a worker that has none left gets its last batch
    again, with gradient weight 0. In asynchronous runs the length is the whole epoch's, although one worker may get most of
    it. Other attributes, such as `dataset`, are the loader's.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        shared: Any,  # hands out its batches
        on_epoch: Callable[[], None],  # called as an epoch begins
        *,
        own: bool = False,  # whether the loader's data belong to this worker alone
        device: torch.device | str | None = None,  # to which batches are moved; None: they stay where they are
    ) -> None:
        self._loader = loader
        self._own = own
        self._move = moving_to(torch.device(device)) if device is not None else None
        self._shared = shared
        self._on_epoch = on_epoch

    def __iter__(self) -> Iterator[Any]:
        self._on_epoch()  # from here on, a step begins when its batch is handed out
        batches = self._shared.epoch(self._loader, own=self._own)
        if self._move is not None:
            batches = map(self._move, batches)
        is_accelerated = hasattr(self._loader, "gradient_state")
        return telling_end(self._loader, batches, length_hint(self)) if is_accelerated else batches

    def __len__(self) -> int:
        return self._shared.length(self._loader, own=self._own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as those that copy and pickle look up before there is a loader
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)
