"""Programs to give advice on: built-in tasks, and users' loops."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.advice.answer import Candidate, Target
from paceline.advice.program import Observed, Program, Shape, observed
from paceline.advice.scratch import Confined, Scratch
from paceline.errors import UsageError
from paceline.optim.flat import FlatBinding
from paceline.run.config import TrainConfig
from paceline.run.simulate_task import simulate_task
from paceline.simulator import Cluster
from paceline.specs.file_loop import load_loop
from paceline.system.machine import intra_op_threads
from paceline.system.torch_random import torch_undisturbed
from paceline.tasks.load import BUILT_IN, load_task

NEVER = 1.0  # a target accuracy that is hardly ever reached: the run evaluates as often, and does not stop
_RATE_STEPS = 60  # of each worker, to measure the speed of simulated workers
_MANY_EPOCHS = 1_000_000.0
_WARM_UP = 0.2


def virtual_rate(candidate: Candidate, cluster: Cluster, shape: Shape) -> float:
    """Samples per virtual second of all workers with vectors and batches of this size, without computing gradients.

    Each worker makes 60 steps, until the first one has finished; the first fifth of that time is the warm-up.
    """
    config = TrainConfig(algorithm=candidate.algorithm, steps=_RATE_STEPS, batch_size=shape.batch_size)
    run = simulate_task(config, cluster=cluster, timing_only=True, num_parameters=shape.num_parameters)
    ended = [rows["ended_s"][rows["applied_version"] >= 1] for rows in run.records.values()]
    end_s = min(float(one[-1]) for one in ended if len(one))
    begin_s = _WARM_UP * end_s
    samples = sum(shape.batch_size * int(((one > begin_s) & (one <= end_s)).sum()) for one in ended)
    return samples / (end_s - begin_s)


@dataclass(frozen=True)
class TaskProgram:
    """A built-in task."""

    name: str
    data: Path | None = None

    def run(
        self, candidate: Candidate, target: Target, *, for_s: float, seed: int, slow: Mapping[int, float]
    ) -> Observed:
        """Trains with real workers; evaluates as a run with this target does, and continues when it is reached."""
        from paceline.run.train import train

        evaluated = {"target_accuracy": NEVER} if target.accuracy is not None else {}
        config = self._config(candidate, seed, limit_s=for_s, epochs=_MANY_EPOCHS, slow=dict(slow) or None, **evaluated)
        began_s = time.perf_counter()
        run = train(config)
        took_s = time.perf_counter() - began_s
        return observed(run, target, real=True, setup_s=took_s)

    def shape(self) -> Shape:
        task = load_task(self.name)
        with torch_undisturbed():
            binding = FlatBinding(task.new_model().parameters())
        return Shape(num_parameters=binding.num_parameters, batch_size=task.batch_size)

    def simulate(
        self, candidate: Candidate, cluster: Cluster, target: Target, *, limit_s: float, limit_samples: int, seed: int
    ) -> Observed:
        epochs = limit_samples / self._num_samples()
        limit = {"limit_s": limit_s} if math.isfinite(limit_s) else {}
        targets = {"target_accuracy": target.accuracy, "target_loss": target.loss}
        config = self._config(candidate, seed, epochs=epochs, **limit, **targets)
        return observed(simulate_task(config, cluster=cluster), target, real=False)

    rate = staticmethod(virtual_rate)

    def command(
        self, candidate: Candidate, target: Target, *, slow: Mapping[int, float], restarts: int, samples: float
    ) -> str:
        task = load_task(self.name)
        needed = math.ceil(samples / self._num_samples()) if math.isfinite(samples) else 0
        options: list[Any] = ["--task", self.name, "--algorithm", candidate.algorithm, "--workers", candidate.workers]
        options += ["--epochs", max(needed, math.ceil(task.epochs)), *shared_options(target, slow, restarts)]
        options += ["--data", self.data] if self.data is not None else []
        return shlex.join(["paceline", "train", *map(str, options)])

    def _config(self, candidate: Candidate, seed: int, **more: Any) -> TrainConfig:
        return TrainConfig(
            task=self.name,
            algorithm=candidate.algorithm,
            workers=candidate.workers,
            seed=seed,
            data=self.data,
            **more,
        )

    def _num_samples(self) -> int:
        train_set: Any = load_task(self.name).load(self.data)[0]
        return len(train_set)


def shared_options(target: Target, slow: Mapping[int, float], restarts: int) -> list[Any]:
    """Options that `train` and `launch` share: the target, slow workers, restarts."""
    options: list[Any] = ["--target-accuracy", f"{target.accuracy:g}"] if target.accuracy is not None else []
    if not options and target.loss is not None:
        options = ["--target-loss", f"{target.loss:g}"]
    for worker, factor in sorted(slow.items()):
        options += ["--slow", f"{worker}:{factor:g}"]
    return options + (["--restarts", restarts] if restarts else [])


@dataclass(frozen=True)
class LoopProgram:
    """A user's own loop, `FILE.py:FUNCTION`, which calls `paceline.attach`; it runs in scratch folders."""

    name: str
    scratch: Scratch

    def function(self) -> Any:
        return load_loop(str(self.scratch.home / self.name))

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[Any]:
        """The loop for workers in this process, with one thread each, in a scratch folder."""
        with intra_op_threads(1), self.scratch.made() as own, self.scratch.inside(own):
            yield self.function()

    def run(
        self, candidate: Candidate, target: Target, *, for_s: float, seed: int, slow: Mapping[int, float]
    ) -> Observed:
        """Launches real workers; evaluates as a run with this target does, and continues when it is reached."""
        from paceline.run.launch import launch

        began_s = time.perf_counter()
        with self.scratch.made() as own:
            run = launch(
                Confined(self.function(), self.scratch, own),
                workers=candidate.workers,
                algorithm=candidate.algorithm,
                seed=seed,
                slow=dict(slow) or None,
                limit_s=for_s,
                target_accuracy=NEVER if target.accuracy is not None else None,
            )
        took_s = time.perf_counter() - began_s
        return observed(run, target, real=True, setup_s=took_s)

    def shape(self) -> Shape:
        from paceline.run.simulate import simulate

        with self._simulated() as loop:
            run = simulate(loop, cluster=Cluster(workers=1), algorithm="sequential", limit_samples=1)
        samples = max((int(rows["samples"].max()) for rows in run.records.values() if len(rows)), default=1)
        return Shape(num_parameters=int(run.result["num_parameters"]), batch_size=samples)

    def simulate(
        self, candidate: Candidate, cluster: Cluster, target: Target, *, limit_s: float, limit_samples: int, seed: int
    ) -> Observed:
        """Trains with real gradients under a virtual clock, at most until the loop ends by itself."""
        from paceline.run.simulate import simulate

        with self._simulated() as loop:
            run = simulate(
                loop,
                cluster=cluster,
                algorithm=candidate.algorithm,
                seed=seed,
                target_loss=target.loss,
                target_accuracy=target.accuracy,
                limit_s=limit_s if math.isfinite(limit_s) else None,
                limit_samples=limit_samples,
            )
        found = observed(run, target, real=False)
        is_over = run.result["outcome"] == "stopped" and len(run.returned) == candidate.workers
        return dataclasses.replace(found, ended_itself=is_over)

    rate = staticmethod(virtual_rate)

    def command(
        self, candidate: Candidate, target: Target, *, slow: Mapping[int, float], restarts: int, samples: float
    ) -> str:
        del samples  # the loop itself decides how long it trains
        options = ["--workers", candidate.workers, "--algorithm", candidate.algorithm]
        return shlex.join(
            map(str, ["paceline", "launch", self.name, *options, *shared_options(target, slow, restarts)])
        )


def load_program(reference: str, scratch: Scratch, data: Path | None = None) -> Program:
    """A built-in task by name, or a user's loop from `FILE.py:FUNCTION`.

    Raises:
        UsageError: no such task or function; the message names the line of an error in the file.
    """
    if reference in BUILT_IN:
        return TaskProgram(name=reference, data=data)
    if data is not None:
        raise UsageError("Only built-in tasks take a data folder; a loop of your own loads its data itself.")
    load_loop(reference)
    return LoopProgram(reference, scratch)
