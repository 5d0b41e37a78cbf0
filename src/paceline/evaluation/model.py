"""Evaluates a run on a copy of its parameters, while the workers go on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from paceline.errors import RunStopped
from paceline.ports.shared import AVERAGE
from paceline.tasks.base import Task
from paceline.vectors.flat import FlatBinding
from paceline.vectors.half_types import is_finite

__all__ = ["NICENESS", "Evaluated", "Evaluator", "ModelEvaluator", "about_evaluated"]

_MODELS_EVALUATED = 16
NICENESS = 10  # the workers come first


def about_evaluated(algorithm: Any) -> dict[str, Any]:
    """What a result says of which parameters were evaluated; nothing where it was the newest ones."""
    if not algorithm.memory.averaged:
        return {}
    return {"evaluated": f"moving average of parameters and buffers, decay {algorithm.average:g}"}


class Evaluated(Protocol):
    """Where an evaluation finds the run's parameters and buffers: an `Arena`, or a simulated machine."""

    @property
    def shared(self) -> Any:
        """The shared parameters; `shared.snapshot(out)` copies them and returns their version.

        Where every worker has a model of its own, `shared.own_models` is true, a snapshot is their mean, and there are
        `shared.consensus_distance(mean)`, `shared.model_ids()` and `shared.model(worker, out)`. Where `shared.average` is
        there, `shared.snapshot_average(out)` is what is evaluated.
        """
        ...

    def extra(self, name: str) -> torch.Tensor:
        """A buffer of the model, by `buffer <name>`; its moving average, by `average buffer <name>`."""
        ...


class ModelEvaluator:
    """A model of its own, on a copy of the shared vector.

    Args:
        model: has the parameters and buffers of what is trained, and is nobody else's.
        figures: maps it to `{"loss": ..., "accuracy": ...}`, each of which may be None.
    """

    def __init__(self, model: nn.Module, figures: Callable[[nn.Module], Mapping[str, float | None]]) -> None:
        self.finite = True  # whether the parameters last evaluated were
        self.loaded_s = 0.0  # when they had been copied, on the monotonic clock
        self.model = model
        self._figures = figures
        self._binding = FlatBinding(model.parameters())
        self.num_parameters = self._binding.num_parameters
        self._x = torch.empty(self._binding.num_elements, dtype=self._binding.dtype)
        self.vector_bytes = self._x.nbytes

    def now(self, arena: Evaluated, about: dict[str, Any]) -> dict[str, Any]:
        """Evaluates here and now."""
        version = self._load(arena)
        figures = self._figures(self.model)
        evaluation = {**about, "version": version, "test_loss": figures["loss"], "test_accuracy": figures["accuracy"]}
        if getattr(arena.shared, "own_models", False):
            evaluation["consensus_distance"] = arena.shared.consensus_distance(self._x)
        return evaluation

    def own_models(self, arena: Evaluated, final: dict[str, Any]) -> dict[str, Any] | None:
        """`consensus_distance` and `worst_worker_accuracy`, where every worker has a model of its own.

        The latter is the lowest test accuracy of up to 16 workers' models, evenly spaced.
        """
        if not getattr(arena.shared, "own_models", False):
            return None
        workers, accuracies = arena.shared.model_ids(), []
        for worker in workers[:: -(-len(workers) // _MODELS_EVALUATED)]:
            arena.shared.model(worker, self._x)
            self._binding.bind(self._x)
            accuracies.append(self._figures(self.model)["accuracy"])
        worst = min((one for one in accuracies if one is not None), default=None)
        return {"consensus_distance": final["consensus_distance"], "worst_worker_accuracy": worst}

    def _load(self, arena: Evaluated) -> int:
        averaged = getattr(arena.shared, "average", None) is not None
        version = arena.shared.snapshot_average(self._x) if averaged else arena.shared.snapshot(self._x)
        self.loaded_s = time.monotonic()
        self.finite = is_finite(self._x)
        self._binding.bind(self._x)
        for name, buffer in self.model.named_buffers():
            prefix = AVERAGE if averaged and buffer.is_floating_point() else ""
            buffer.copy_(arena.extra(f"{prefix}buffer {name}"))
        return version


class Evaluator(ModelEvaluator):
    """A task's evaluations, here or in a thread.

    Args:
        task: what is trained.
        test_set: what it is tested on.
        seed: of the model's initial parameters: the same as the workers'.
    """

    def __init__(self, task: Task, test_set: Dataset[Any], seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = task.model()
        super().__init__(model, partial(task.evaluate, dataset=test_set))
        self._task = task
        self._thread: threading.Thread | None = None
        self._finished: dict[str, Any] | None = None

    def initial_loss(self, dataset: Dataset[Any], samples: list[int]) -> float | None:
        """Mean loss over some samples, before anything was loaded."""
        return self._task.evaluate(self.model, Subset(dataset, samples))["loss"]

    @property
    def busy(self) -> bool:
        """Whether an evaluation is going on or waits to be collected."""
        return self._thread is not None

    def start(self, arena: Evaluated, about: dict[str, Any]) -> None:
        """Begins an evaluation in a thread; `about` is handed back with its figures."""
        self._thread = threading.Thread(target=self._run, args=(arena, about), name="paceline-evaluator", daemon=True)
        self._thread.start()

    def collect(self) -> dict[str, Any] | None:
        """The evaluation that has finished since the last call, if any."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        return self._finished

    def finish(self) -> None:
        """Waits for a running evaluation and forgets it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, arena: Evaluated, about: dict[str, Any]) -> None:
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._finished = None
        with contextlib.suppress(RunStopped):  # while this waited for the lock; the last evaluation is made afterwards
            self._finished = self.now(arena, about)
