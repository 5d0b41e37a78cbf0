"""Advice as JSON: units in every name, and null where a number is infinite or unknown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.advice.answer import Advice, Candidate, Circumstances, Measured, Prediction, Target
from paceline.planner.estimate import Estimate

__all__ = ["as_json"]


def as_json(advice: Advice) -> dict[str, Any]:
    """The whole answer. `low` and `high` bound what lies between them with a confidence of 90 %; a null `high` is no bound."""
    measure = "test_accuracy" if advice.target.accuracy is not None else "train_loss"
    best = advice.best
    return {
        "program": advice.program,
        "target": _target(advice.target),
        "circumstances": _circumstances(advice.circumstances),
        "best": None if best is None else _candidate(best.candidate),
        "command": advice.command,
        "reasons": list(advice.reasons),
        "warnings": list(advice.warnings),
        "not_tried": list(advice.not_tried),
        "ranked": [_prediction(one, measure) for one in advice.ranked],
        "measured": [_measured(one, measure) for one in advice.measured],
        "fits": [
            {
                "algorithm": one.algorithm,
                "leave_one_out_log10": {str(m): _number(error) for m, error in one.leave_one_out.items()},
                "step_error_share": _number(one.step_error),
            }
            for one in advice.fits
        ],
        "took_s": _number(advice.took_s),
        "machine": advice.machine,
    }


def _target(target: Target) -> dict[str, Any]:
    return {"train_loss": target.loss, "test_accuracy": target.accuracy, "deadline_s": target.deadline_s}


def _circumstances(given: Circumstances) -> dict[str, Any]:
    slow = {str(worker): factor for worker, factor in sorted(given.slow.items())}
    return {"slow": slow, "kills_per_worker_and_s": given.kills_per_s, "cluster": given.cluster}


def _candidate(one: Candidate) -> dict[str, Any]:
    return {"algorithm": one.algorithm, "workers": one.workers}


def _prediction(one: Prediction, measure: str) -> dict[str, Any]:
    return {
        **_candidate(one.candidate),
        "time_s": _estimate(one.time_s),
        "why_not": one.why_not,
        f"{measure}_at_deadline": _estimate(one.at_deadline),
        "samples_per_s": _estimate(one.samples_per_s),
        "samples_to_target": _estimate(one.samples_to_target),
        "simulated_s": [_number(value) for value in one.simulated_s],
        "modelled_s": _estimate(one.modelled_s),
        "staleness_updates": _number(one.staleness),
        "extrapolation": one.extrapolation,
        "curve": _curve(one.curve, measure),
    }


def _measured(one: Measured, measure: str) -> dict[str, Any]:
    return {
        **_candidate(one.candidate),
        "samples_per_s": _estimate(one.samples_per_s),
        "curve": _curve(one.curve, measure),
    }


def _curve(curve: Sequence[tuple[float, float]], measure: str) -> dict[str, Any]:
    return {"time_s": [_number(at) for at, _ in curve], measure: [_number(value) for _, value in curve]}


def _estimate(one: Estimate | None) -> dict[str, Any] | None:
    if one is None:
        return None
    ends = {name: _number(getattr(one, name)) for name in ("value", "low", "high")}
    return ends | ({"extrapolation": one.extrapolation} if one.extrapolation else {})


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
