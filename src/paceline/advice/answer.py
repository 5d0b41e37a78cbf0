"""The answer of `paceline advise`: candidates, their measurements and predictions, and the advice, also as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from paceline.planner.estimate import Estimate

_LEAST_GAP = 1e-4  # of an accuracy to 1: some test sets are learnt to the last sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A target: exactly one of a loss and an accuracy; or, with a deadline, the best value by then."""

    #: Mean training loss of the last 100 gradients, as `paceline train --target-loss` means it.
    loss: float | None = None
    accuracy: float | None = None  # test accuracy, from 0 to 1
    deadline_s: float | None = None  # seconds; None: as soon as possible

    def gap(self, value: float) -> float:
        """The quantity that Hemingway's model fits: the loss, or the error rate."""
        return max(_LEAST_GAP, 1 - value) if self.accuracy is not None else value

    def of_gap(self, gap: float) -> float:
        """The loss or accuracy of a gap: the inverse of `gap`."""
        return min(1.0, max(0.0, 1 - gap)) if self.accuracy is not None else gap

    def best(self, values: Iterable[float]) -> float | None:
        return min(filter(math.isfinite, values), key=self.gap, default=None)

    def text(self, value: float) -> str:
        """In a sentence: `an accuracy of 0.95`, `a loss of 0.12`."""
        return f"an accuracy of {value:.4g}" if self.accuracy is not None else f"a loss of {value:.4g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to train."""

    algorithm: str
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """The conditions that the user expects."""

    slow: dict[int, float] = field(default_factory=dict)  # by worker, the factor on its compute time
    kills_per_s: float = 0.0  # of each worker; 0: none
    cluster: str | None = None  # path of the cluster file that describes the machines; None: this machine, measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A short real run on this machine."""

    candidate: Candidate
    samples_per_s: Estimate  # of all workers together, after the warm-up, with its interval
    curve: tuple[tuple[float, float], ...]  # pairs of seconds and loss or accuracy, in order of time


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """When a candidate reaches the target, and how well it does by the deadline."""

    candidate: Candidate
    time_s: Estimate | None  # seconds to the target, with its interval; None: it is not reached
    #: Why there is no `time_s`, as the end of a sentence ("diverged in 2 of 2 simulations"); "" if there is.
    why_not: str = ""
    at_deadline: Estimate | None = None  # loss or accuracy at the deadline; None: no deadline, or unknown
    samples_per_s: Estimate
    samples_to_target: Estimate | None  # samples trained on until then; None: never
    simulated_s: tuple[float, ...] = ()  # seconds to the target in each simulation; inf if it was not reached
    #: Seconds to the target by Hemingway's convergence model, with Ernest's system model if it has not run.
    modelled_s: Estimate | None = None
    staleness: float | None = None  # mean, of the simulations; None: the algorithm has none
    curve: tuple[tuple[float, float], ...] = ()  # predicted pairs of seconds and loss or accuracy, in order of time
    extrapolation: str = ""  # how the prediction extrapolates from the runs, in words; "" if it does not

    @property
    def arrives(self) -> bool:
        """Whether it reaches the target, or its value at the deadline is known."""
        return self.time_s is not None or self.at_deadline is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How well one algorithm's models predict data that they were not fitted to."""

    algorithm: str
    #: Root mean square error of log10 of the loss above its optimum, by the number of workers left out.
    leave_one_out: dict[int, float]
    step_error: float | None  # largest share by which the system model misses a measured step time


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The ranked candidates, and how certain the ranking is."""

    program: str  # as the user named it
    target: Target
    circumstances: Circumstances
    ranked: tuple[Prediction, ...]  # the best first; those that never reach the target last
    measured: tuple[Measured, ...]  # short runs on this machine
    fits: tuple[Fit, ...]
    reasons: tuple[str, ...]  # how certain the first rank is; if no candidate reaches the target, the best value
    not_tried: tuple[str, ...]  # sentences: what was left out, and why
    #: Sentences on extrapolation, close calls, disturbed measurements, no gain from asynchronous SGD.
    warnings: tuple[str, ...]
    command: str  # starts the first; "" if no candidate reaches the target
    took_s: float
    machine: dict[str, Any]  # the measured machine, from `paceline.system.machine.machine`

    @property
    def best(self) -> Prediction | None:
        """The recommended candidate; None: no candidate reaches the target."""
        first = self.ranked[0] if self.ranked else None
        return first if first is not None and first.arrives else None


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
    """A candidate's fields, and its curve by columns; `measure` names the target's quantity."""
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
