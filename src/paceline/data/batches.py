"""What workers need of a loader to share its batches."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch

from paceline.data.same_data import Fingerprint
from paceline.ports.round_shares import RoundShares

DRAWN_EPOCH = 1 << 32  # numbers from one drawn epoch to the next, which may have another length


class LoaderBatches(Protocol):
    """The batches of a loader, epoch after epoch, the same on every worker.

    Attributes:
        earlier: batches of earlier epochs that are still available, by place, which is negative.
    """

    loader: Any
    key: object = "drawn"  # equal for loaders that have the same batches
    length: int | None = None  # batches in an epoch; None: not known before it ends
    epoch_numbers: int = DRAWN_EPOCH  # from an epoch's first batch number to the next one's
    device: torch.device | None = None  # to which batches are moved; None: they are not moved
    can_repeat: bool = True  # whether a batch can be fetched after its turn
    shares: RoundShares | None = None  # sizes of the batches, if rounds are divided by speed; None: the loader's sizes
    earlier: dict[int, Any] = {}  # noqa: RUF012  (never changed)

    def begin(self, epoch: int, unmet: Collection[int] = ()) -> int:
        """Begins an epoch and draws its order; returns its number, or an earlier number if that epoch continues.

        The previous epoch's batches at the places `unmet` stay available, at negative places.
        """
        ...

    def fingerprint(self, *, in_processes: bool) -> Fingerprint:
        """The fingerprint of the current epoch; `in_processes`: whether the loader's processes fetch the samples."""
        ...

    def has(self, place: int) -> bool:
        """Whether the current epoch has a batch at this place."""
        ...

    def indices(self, place: int) -> Any:
        """The loader's sampler's output for that batch."""
        ...

    def samples(self, place: int) -> int:
        """Number of samples in that batch, without fetching it; 0: unknown. With `shares`, only a round's sum is exact."""
        ...

    def fetch(self, place: int) -> Any: ...
