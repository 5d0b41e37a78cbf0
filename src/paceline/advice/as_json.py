"""Advice as JSON: units in every name, and null where a number is infinite or unknown."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Any

from paceline.advice.answer import Advice, Measured, Prediction
from paceline.planner.estimate import Estimate


def as_json(advice: Advice) -> dict[str, Any]:
    """The whole answer. `low` and `high` bound a value with 90 % confidence; a null `high` means no upper bound."""
    measure = "test_accuracy" if advice.target.accuracy is not None else "train_loss"
    target, given, best = advice.target, advice.circumstances, advice.best
    slow = {str(worker): factor for worker, factor in sorted(given.slow.items())}
    return {
        "program": advice.program,
        "target": {"train_loss": target.loss, "test_accuracy": target.accuracy, "deadline_s": target.deadline_s},
        "circumstances": {"slow": slow, "kills_per_worker_and_s": given.kills_per_s, "cluster": given.cluster},
        "best": None if best is None else asdict(best.candidate),
        "command": advice.command,
        "reasons": list(advice.reasons),
        "warnings": list(advice.warnings),
        "not_tried": list(advice.not_tried),
        "ranked": [_row(one, measure) for one in advice.ranked],
        "measured": [_row(one, measure) for one in advice.measured],
        "fits": [
            {
                "algorithm": one.algorithm,
                "leave_one_out_log10": {str(m): _plain(error) for m, error in one.leave_one_out.items()},
                "step_error_share": _plain(one.step_error),
            }
            for one in advice.fits
        ],
        "took_s": _plain(advice.took_s),
        "machine": advice.machine,
    }


def _row(one: Prediction | Measured, measure: str) -> dict[str, Any]:
    """A candidate's fields, its curve by columns; `measure` is what the target is about."""
    names = {"at_deadline": f"{measure}_at_deadline", "staleness": "staleness_updates"}
    own = [field.name for field in fields(one) if field.name not in ("candidate", "curve")]
    curve = {"time_s": [_plain(at) for at, _ in one.curve], measure: [_plain(value) for _, value in one.curve]}
    return {
        **asdict(one.candidate),
        **{names.get(name, name): _plain(getattr(one, name)) for name in own},
        "curve": curve,
    }


def _plain(value: Any) -> Any:
    match value:
        case Estimate():
            return {name: _plain(one) for name, one in asdict(value).items()}
        case tuple():
            return [_plain(one) for one in value]
        case float() if not math.isfinite(value):
            return None
    return value
