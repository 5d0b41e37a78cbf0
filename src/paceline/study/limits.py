"""When a study's trials end, and which combinations become trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from paceline.errors import UsageError
from paceline.specs.bounds import COUNT, EPOCHS, SECONDS_ABOVE_0, SEED, TRIALS
from paceline.specs.types import check_fields

__all__ = ["Design", "Limits", "is_number", "is_whole"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a trial ends that has not reached its target.

    Args:
        epochs: passes over the training data; None with `steps` None: the task's.
        steps: instead: gradients per worker.
        seconds: of training, virtual ones in the simulator; the first limit counts.
    """

    epochs: Annotated[float, EPOCHS] | None = None
    steps: Annotated[int, COUNT] | None = None
    seconds: Annotated[float, SECONDS_ABOVE_0] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.epochs is not None and self.steps is not None:
            raise UsageError("give either epochs or steps, not both.")


@dataclass(frozen=True, kw_only=True)
class Design:
    """Which combinations of levels become trials.

    Args:
        kind: "grid": all; "one-at-a-time": the baseline, and each level of each factor with all others as there; "random":
            so many, drawn; "optuna": so many, each chosen by what the earlier ones have measured.
        trials: combinations to draw or to ask for, each tried with every seed.
        seed: of the draws, and of the order of the trials.
        measure: for optuna: a column of the table, such as time_to_5_s; its median over the seeds counts.
        goal: whether less of it is better, or more.
    """

    kind: Literal["grid", "one-at-a-time", "random", "optuna"] = "grid"
    trials: Annotated[int, TRIALS] | None = None
    seed: Annotated[int, SEED] = 0
    measure: str | None = None
    goal: Literal["minimize", "maximize"] = "minimize"

    def __post_init__(self) -> None:
        check_fields(self)
        needs_number = self.kind in ("random", "optuna")
        if needs_number and self.trials is None:
            raise UsageError(f"a {self.kind} design needs a number of combinations: add trials = 20.")
        if not needs_number and self.trials is not None:
            raise UsageError(f"a {self.kind} design says itself how many trials there are; leave out trials.")
        if (self.kind == "optuna") != (self.measure is not None):
            remedy = 'add measure = "time_to_5_s"' if self.kind == "optuna" else "leave out measure"
            raise UsageError(f"a measure is what an optuna design looks at; {remedy}.")


def is_number(value: Any) -> bool:
    """A number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """A whole number, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)
