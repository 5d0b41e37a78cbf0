"""Injected staleness as an option of a run: its spec, the delayed algorithm, and its entry in the result."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.algorithms import Algorithm, spec
from paceline.algorithms.server.delay import Delay
from paceline.algorithms.server.registries import delay_registry, delay_spec
from paceline.data.plan import BatchPlan
from paceline.errors import UsageError
from paceline.run.config import TrainConfig

__all__ = ["inject", "injected"]


def inject(algorithm: Algorithm, config: TrainConfig, plan: BatchPlan | None) -> Algorithm:
    """The algorithm with a delay before its updates; unchanged if no delay is configured.

    Args:
        algorithm: of the run.
        config: has the delay.
        plan: has the length of an epoch; None: the run has no data.

    Raises:
        UsageError: the algorithm takes no delay, or the run has no epochs.
    """
    if config.inject_staleness is None:
        return algorithm
    late: Delay = delay_registry.build(delay_spec(config.inject_staleness))
    if config.staleness_ramp_epochs is not None:
        if late.ramp_updates:
            raise UsageError("The delay has a ramp of its own: leave out ramp_updates or --staleness-ramp-epochs.")
        if plan is None:
            raise UsageError(
                "A run without data has no epochs for --staleness-ramp-epochs: give the ramp in updates, as"
                ' --inject-staleness "constant(updates_late=20, ramp_updates=500)".'
            )
        updates_per_epoch = plan.rounds_per_epoch() if algorithm.together else plan.batches_per_epoch
        late = dataclasses.replace(late, ramp_updates=round(config.staleness_ramp_epochs * updates_per_epoch))
    return algorithm.delayed(late)


def injected(config: TrainConfig, algorithm: Algorithm) -> dict[str, Any]:
    """The result's entry about the injection: the option as given, and its effect; empty without injection."""
    if config.inject_staleness is None:
        return {}
    return {
        "inject_staleness": config.inject_staleness,
        "staleness_ramp_epochs": config.staleness_ramp_epochs,
        "algorithm_with_delay": spec(algorithm),
    }
