"""When to stop a user's loop before its end, and when to evaluate it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError
from paceline.specs.bounds import check_run

EVALUATE_EVERY_SAMPLES = 10_000  # if the length of an epoch is unknown


@dataclass(frozen=True, kw_only=True)
class Goal:
    """When to stop, and when to evaluate; with everything None, the loop decides and nothing is evaluated.

    Args:
        target_loss: stop once the mean of the last 100 losses of applied gradients, as reported, is at most this.
        target_accuracy: instead: stop once `evaluate` finds at least this.
        limit_s: stop after this many seconds of training (virtual seconds in a simulation).
        limit_samples: stop after this many samples of applied gradients.
        evaluate_every_samples: evaluate this often; None: every quarter of an epoch with a target accuracy, else every epoch.
    """

    target_loss: float | None = None
    target_accuracy: float | None = None
    limit_s: float | None = None
    limit_samples: int | None = None
    evaluate_every_samples: int | None = None

    def __post_init__(self) -> None:
        check_run(dataclasses.asdict(self))
        if self.target_loss is not None and self.target_accuracy is not None:
            raise UsageError("Give either a target loss or a target accuracy, not both.")

    @property
    def any(self) -> bool:
        return any(value is not None for value in dataclasses.asdict(self).values())

    def share_done(self, elapsed_s: float, samples: int) -> float:
        """The share of the nearest limit that is used up; 0 without limits."""
        shares = [elapsed_s / self.limit_s] if self.limit_s is not None else []
        shares += [samples / self.limit_samples] if self.limit_samples is not None else []
        return min(1.0, max(shares, default=0.0))

    def check(self, evaluate: Callable[..., Any] | None) -> None:
        """Refuses a target accuracy if the loop's `attach` got no `evaluate`."""
        if self.target_accuracy is not None and evaluate is None:
            raise UsageError(
                "A target accuracy needs a way to evaluate the loop: give attach a function of the model that returns "
                "its test accuracy, attach(model, optimizer, evaluate=accuracy)."
            )

    def evaluate_every(self, epoch_samples: int) -> int:
        """Samples between two evaluations of a loop with this many samples per epoch; 0: unknown."""
        if self.evaluate_every_samples is not None:
            return self.evaluate_every_samples
        if not epoch_samples:
            return EVALUATE_EVERY_SAMPLES
        return max(1, epoch_samples // (4 if self.target_accuracy is not None else 1))
