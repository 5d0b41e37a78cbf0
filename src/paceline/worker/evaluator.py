"""Evaluates a run on a copy of its parameters, while the workers continue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from paceline.optim.flat import FlatBinding
from paceline.optim.half_types import is_finite
from paceline.optim.model_state import dense_buffers
from paceline.ports.shared import AVERAGE
from paceline.specs.user_file import run_user_code
from paceline.system.torch_random import torch_undisturbed
from paceline.tasks.base import Task

_MODELS_EVALUATED = 16
_INITIAL_SAMPLES = 10_000  # the initial loss is a mean over at most so many training samples


def about_evaluated(algorithm: Any) -> dict[str, Any]:
    """A result's entry about which parameters were evaluated; empty for the newest ones."""
    if not algorithm.needs.averaged:
        return {}
    return {"evaluated": f"moving average of parameters and buffers, decay {algorithm.average:g}"}


class Evaluated(Protocol):
    """The source of the run's parameters and buffers for an evaluation: an `Arena`, or a simulated machine."""

    @property
    def shared(self) -> Any:
        """The shared parameters; `shared.snapshot(out)` copies them and returns their version.

        If every worker has its own model, `shared.own_models` is true, a snapshot is their mean, and there are
        `shared.consensus_distance(mean)`, `shared.model_ids()` and `shared.model(worker, out)`. If there is a
        `shared.average`, evaluations use `shared.snapshot_average(out)`.
        """
        ...

    def extra(self, name: str) -> torch.Tensor:
        """A buffer of the model, by `buffer <name>`; its moving average, by `average buffer <name>`."""
        ...


class Evaluator:
    """Evaluates with its own model, on a copy of the shared vector."""

    def __init__(self, model: nn.Module, figures: Callable[[nn.Module], Mapping[str, float | None]]) -> None:
        self.finite = True  # whether the last evaluated parameters were finite
        self.loaded_s = 0.0  # when these had been copied, on the monotonic clock
        self.model = model  # with the parameters and buffers of the trained model; used only here
        self._figures = figures  # maps the model to `{"loss": ..., "accuracy": ...}`; each may be None
        self._buffers = dense_buffers(model)
        self._binding = FlatBinding(model.parameters(), on_any_device=True)
        self.live: dict[str, torch.Tensor] = {}  # buffers that are read in place of the run's, by name
        self.num_parameters = self._binding.num_parameters
        self._x = torch.empty(self._binding.num_elements, dtype=self._binding.dtype)
        self._bound = self._x if self._binding.device.type == "cpu" else self._binding.zeros()
        self.vector_bytes = self._x.nbytes

    def now(self, run: Evaluated, about: dict[str, Any]) -> dict[str, Any]:
        """Evaluates now; the returned mapping begins with `about`."""
        averaged = getattr(run.shared, "average", None) is not None
        version = run.shared.snapshot_average(self._x) if averaged else run.shared.snapshot(self._x)
        self.loaded_s = time.monotonic()
        self.finite = is_finite(self._x)
        figures = self._figures_of_x(run, averaged=averaged)
        evaluation = {**about, "version": version, "test_loss": figures["loss"], "test_accuracy": figures["accuracy"]}
        if getattr(run.shared, "own_models", False):
            evaluation["consensus_distance"] = run.shared.consensus_distance(self._x)
        return evaluation

    def worst_worker_accuracy(self, run: Evaluated) -> float | None:
        """The lowest test accuracy of up to 16 workers' own models, evenly spaced; None if they have none."""
        if not getattr(run.shared, "own_models", False):
            return None
        workers, accuracies = run.shared.model_ids(), []
        for worker in workers[:: -(-len(workers) // _MODELS_EVALUATED)]:
            run.shared.model(worker, self._x)
            accuracies.append(self._figures_of_x(run)["accuracy"])
        return min((one for one in accuracies if one is not None), default=None)

    def _figures_of_x(self, run: Evaluated, *, averaged: bool = False) -> Mapping[str, float | None]:
        if self._bound is not self._x:  # read on the host, as a copy to a GPU would hold up those who write
            self._bound.copy_(self._x)
        self._binding.bind(self._bound)
        for name, buffer in self._buffers.items():
            prefix = AVERAGE if averaged and buffer.is_floating_point() else ""
            live = self.live.get(name)
            buffer.copy_(run.extra(f"{prefix}{name}") if live is None else live)
        return self._figures(self.model)


def task_evaluator(task: Task, test_set: Dataset[Any], seed: int) -> Evaluator:
    """Evaluates a task on its test set; its model begins with the workers' initial parameters for this seed."""
    with torch_undisturbed():
        model = task.new_model(seed)
    return Evaluator(model, partial(task.evaluate, dataset=test_set))


def initial_loss(task: Task, evaluator: Evaluator, train_set: Dataset[Any]) -> float | None:
    """Mean training loss of some samples before the first update: the reference of `time_to_fraction_s`.

    Raises:
        UsageError: the task's model, loss or accuracy fails on its samples.
    """
    num_samples = len(train_set)  # type: ignore[arg-type]
    some = range(0, num_samples, -(-num_samples // _INITIAL_SAMPLES))
    samples = Subset(train_set, list(some))
    what = f"Task '{task.name}': computing its loss and accuracy"
    return run_user_code(None, what, lambda: task.evaluate(evaluator.model, samples))["loss"]
