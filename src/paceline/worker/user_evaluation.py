"""Evaluates a run with the user's `evaluate`, on a separate copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError, shown
from paceline.worker.evaluator import Evaluator

Evaluate = Callable[[nn.Module], "float | Mapping[str, float]"]

_REMEDY = "return the test accuracy as a fraction, or a mapping with 'accuracy', 'loss' or both"


def loop_evaluator(model: nn.Module, evaluate: Evaluate, *, needs_accuracy: bool) -> Evaluator:
    """Evaluates with the user's function, on a copy of `model` that is made now.

    Raises:
        UsageError: the model cannot be copied; or, in an evaluation, `evaluate` returns neither an accuracy nor a loss, or
            no accuracy where one is needed.
    """
    try:
        own = copy.deepcopy(model)
    except Exception as error:
        raise UsageError(
            f"evaluate is called with a copy of the model, and copy.deepcopy cannot make one ({error}); keep in the model only"
            " parameters, buffers and plain values, or leave out evaluate."
        ) from error

    def figures(model: nn.Module) -> dict[str, float | None]:
        model.eval()
        with torch.no_grad():
            found = figures_of(evaluate(model))
        if needs_accuracy and found["accuracy"] is None:
            raise UsageError(
                "evaluate returned no accuracy, but the run has a target accuracy: return the accuracy, too."
            )
        return found

    return Evaluator(own, figures)


def figures_of(returned: Any) -> dict[str, float | None]:
    """`{"loss": ..., "accuracy": ...}` from a user function's return value.

    >>> figures_of(0.5)
    {'loss': None, 'accuracy': 0.5}

    Raises:
        UsageError: it is neither a number nor a mapping with either, or the accuracy is not in [0, 1].
    """
    named = returned if isinstance(returned, Mapping) else {"accuracy": returned}
    if "accuracy" not in named and "loss" not in named:
        raise UsageError(f"evaluate returned a mapping with {', '.join(map(str, named)) or 'nothing'}: {_REMEDY}.")
    found: dict[str, float | None] = {}
    for name in ("loss", "accuracy"):
        value = named.get(name)
        try:
            found[name] = float(value) if value is not None else None
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(f"evaluate returned {shown(value)} as {name}: {_REMEDY}.") from None
    accuracy = found["accuracy"]
    if (accuracy is None and found["loss"] is None) or (accuracy is not None and not 0 <= accuracy <= 1):
        raise UsageError(f"evaluate returned {shown(returned)}: {_REMEDY}; 0.95 is 95 %.")
    return found
