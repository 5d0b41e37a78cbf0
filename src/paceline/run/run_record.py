"""The running record of a run, real or simulated, and the content of its `result.json`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.algorithms import Algorithm
from paceline.records.batch_sizes import batch_sizes, ideal_step_s
from paceline.records.summary import NO_UPDATE, WINDOW, summarize, unrecorded
from paceline.specs.goal import Goal
from paceline.worker.supervised import Outcome


class RunRecord:
    """Samples, losses and evaluations of a run, and whether it is at its goal."""

    def __init__(
        self,
        goal: Goal,
        initial_loss: float | None,
        *,
        samples: int = 0,
        evaluations: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.goal = goal
        self.initial_loss = initial_loss
        self.samples = samples
        self.evaluations = list(evaluations)
        self._losses: deque[float] = deque(maxlen=WINDOW)  # of applied gradients, in the order of their updates

    @property
    def loss(self) -> float | None:
        """Mean of the last 100 losses, or of all if there are fewer."""
        return float(np.mean(self._losses)) if self._losses else None

    def is_at_goal(self) -> bool:
        """Whether the target loss is reached, or the limit of samples."""
        goal = self.goal
        if goal.limit_samples is not None and self.samples >= goal.limit_samples:
            return True
        return (
            goal.target_loss is not None
            and len(self._losses) == WINDOW
            and float(np.mean(self._losses)) <= goal.target_loss
        )

    def take_evaluation(self, evaluation: dict[str, Any]) -> bool:
        """Records an evaluation; returns whether it reaches the target accuracy."""
        self.evaluations.append(evaluation)
        accuracy, target = evaluation["test_accuracy"], self.goal.target_accuracy
        return target is not None and accuracy is not None and accuracy >= target

    def end_if_not_finite(self, outcome: Outcome, *, finite: bool) -> None:
        """Ends the run as `diverged` if its last evaluated parameters were not finite."""
        if outcome.name == "stopped" and not finite:
            outcome.name = "diverged"
            outcome.reason = f"The parameters are not finite at version {self.evaluations[-1]['version']}."

    @staticmethod
    def choice_notes(algorithm: Algorithm, num_workers: int, delay: int) -> list[str]:
        """New warnings about this delay, which the programs chose."""
        now, before = algorithm.caution(num_workers, delay), algorithm.caution(num_workers)
        return [now] if now and now != before else []

    @staticmethod
    def unrecorded_updates(algorithm: Algorithm, records: Mapping[int, np.ndarray], shared: Any, **named: Any) -> int:
        """Updates without a record; `named`: as for `unrecorded`, where workers share the parameters."""
        if algorithm.gossip:
            written = [np.count_nonzero(rows["applied_version"] >= 1) for _, rows in sorted(records.items())]
            return sum(max(0, made - int(n)) for made, n in zip(shared.updates(), written, strict=False))
        return unrecorded(records, shared.version, waits=algorithm.lets_gradients_wait, **named)

    @staticmethod
    def lacking(records: Mapping[int, np.ndarray], ends: Iterable[tuple[int, int | None]]) -> int:
        """How many workers lack the record of their last update, by `ends`; None: it is the run's newest."""
        last = {worker: int(rows["applied_version"].max(initial=0)) for worker, rows in records.items()}
        newest = max(last.values(), default=0)
        return sum((newest if end is None else end) > last.get(worker, 0) for worker, end in ends)

    def figures(
        self,
        records: Mapping[int, np.ndarray],
        outcome: Outcome,
        *,
        about: Mapping[str, Any],
        algorithm: Algorithm | None,
        num_workers: int,
        wall_s: float,
        shared: Any,
        own_models: Mapping[str, float | None],
        unresolved_exchanges: int,
        delay: int,
        updates_lost: int,
        records_lost: int,
        has_ended_itself: bool,
    ) -> dict[str, Any]:
        """The content of `result.json`, which begins with `about`; gives `outcome` its final name.

        A run that reached its target is `converged`; one that has ended itself without an update is `crashed`. An update of
        several workers that has no record counts once in `updates_lost`, and for each of them in `records_lost`.
        """
        goal, gossip = self.goal, algorithm is not None and algorithm.gossip
        figures = summarize(
            records,
            num_workers=num_workers,
            wall_s=wall_s,
            initial_loss=self.initial_loss,
            target_loss=goal.target_loss,
            target_accuracy=goal.target_accuracy,
            evaluations=self.evaluations,
            lockstep=algorithm is not None and algorithm.together,
            gossip=gossip,
        )
        figures["steps"] += updates_lost
        if outcome.name == "stopped" and figures["time_to_target_s"] is not None:
            outcome.name = "converged"
        if outcome.name == "stopped" and has_ended_itself and not figures["steps"]:
            outcome.name, outcome.kind, outcome.reason = "crashed", "error", NO_UPDATE
        by_speed = algorithm is not None and algorithm.by_speed
        touched, chosen = getattr(shared, "touched_slots", None), getattr(shared, "chosen", lambda: None)()
        return {
            **about,
            "outcome": outcome.name,
            "outcome_reason": outcome.reason,
            "outcome_trace": outcome.trace,
            **figures,
            "gossip": gossip,
            "waits_for": algorithm.waits_for if algorithm is not None else None,
            **(algorithm.figures(delay, num_workers) if algorithm is not None else {}),
            **own_models,
            **({"batch_sizes": batch_sizes(records), "ideal_step_s": ideal_step_s(records)} if by_speed else {}),
            **({"chosen_gradients": chosen} if chosen else {}),
            "unresolved_exchanges": unresolved_exchanges,
            "workers_lost": outcome.workers_lost,
            "restarts": outcome.restarts,
            "records_lost": records_lost,
            "initial_loss": self.initial_loss,
            "version": shared.version if shared is not None else 0,
            "target_loss": goal.target_loss,
            "target_accuracy": goal.target_accuracy,
            "vectors_touched": touched() if touched is not None else None,
        }
