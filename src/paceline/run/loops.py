"""A driver's description of the loop that its workers run: a user's function, or a task's loop with more details."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.algorithms import Algorithm, registry
from paceline.data.plan import BatchPlan
from paceline.memory.segment import Segment
from paceline.run.config import TrainConfig
from paceline.specs.goal import Goal
from paceline.worker.evaluator import Evaluator


@dataclass(frozen=True, kw_only=True)
class TaskParts:
    """The details of a task's loop."""

    plan: BatchPlan
    evaluator: Evaluator  # evaluates it in the supervisor's process
    initial_loss: float | None
    inputs: dict[str, Any]  # fingerprints of its file and training set
    # Shared memory that has the training set; every worker receives a descriptor. None: the set is sent along.
    dataset: Segment | None


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What every worker runs."""

    function: Callable[[], Any]  # called in every worker
    config: TrainConfig  # the run's; its `task` is the task's name, or the function's
    algorithm: Algorithm | None  # how the workers agree, with any injected delay; None if a user's function names it
    goal: Goal  # when to stop before the loops' end, and when to evaluate
    command: str  # the command line, for the result and the report
    task: TaskParts | None = None  # the details of a task's loop; None: it is a user's
    plan: Any = None  # of a placed model
    step_deadline_s: float = 60.0  # how long its workers wait for each other
    script: str | None = None  # the fingerprint of the file that has a user's function
    file: str | None = None  # that file, where `paceline launch` has named it

    def record(self) -> dict[str, Any]:
        if self.task is not None:
            data = os.fspath(self.config.data) if self.config.data is not None else None
            return dataclasses.asdict(self.config) | {"data": data}
        keys = ("workers", "backend", "seed", "placement", "intra_op_threads", "min_workers")
        own = {key: getattr(self.config, key) for key in keys}
        return own | dataclasses.asdict(self.goal) | {"slow": self.config.slow}

    def about(self, algorithm: Algorithm | None) -> dict[str, Any]:
        """The entries that identify the run in its result, with the algorithm that it used."""
        if self.task is not None and algorithm is not None:
            about = self.config.about_task(algorithm)
            about |= {"num_parameters": self.task.evaluator.num_parameters, "inputs": self.task.inputs}
        else:
            about = self.config.identity()
            about["algorithm"] = registry.spec(algorithm) if algorithm is not None else None
            del about["batch_size"]
            about["inputs"] = {"script": self.script, "file": self.file}
        return about | {"command": self.command}
