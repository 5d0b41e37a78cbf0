"""Programs to advise on: users' own loops, or built-in tasks by name."""

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
from paceline.advice.tasks import NEVER, TaskProgram, shared_options, virtual_rate
from paceline.errors import UsageError
from paceline.simulator import Cluster
from paceline.specs.file_loop import load_loop
from paceline.system.machine import intra_op_threads
from paceline.tasks.load import BUILT_IN


@dataclass(frozen=True)
class LoopProgram:
    """A user's own loop, `FILE.py:FUNCTION`, which calls `paceline.attach`; it runs in scratch folders."""

    name: str
    scratch: Scratch

    def function(self) -> Any:
        return load_loop(str(self.scratch.home / self.name))

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[Any]:
        """The loop, for workers of this process: one thread, as a worker has, and in a scratch folder."""
        with intra_op_threads(1), self.scratch.made() as own, self.scratch.inside(own):
            yield self.function()

    def run(
        self, candidate: Candidate, target: Target, *, for_s: float, seed: int, slow: Mapping[int, float]
    ) -> Observed:
        """Launches real workers; evaluates as a run with this target would, and continues when it is reached."""
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
        """Trains with real gradients under a virtual clock, until the loop's own end at most."""
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
        del samples  # the loop says itself how long it goes on
        options = ["--workers", candidate.workers, "--algorithm", candidate.algorithm]
        return shlex.join(
            map(str, ["paceline", "launch", self.name, *options, *shared_options(target, slow, restarts)])
        )


def load_program(reference: str, scratch: Scratch, data: Path | None = None) -> Program:
    """A built-in task by name, or a user's loop from `FILE.py:FUNCTION`.

    Raises:
        UsageError: the reference names nothing that exists; a file's message names the line.
    """
    if reference in BUILT_IN:
        return TaskProgram(name=reference, data=data)
    if data is not None:
        raise UsageError("Only built-in tasks take a data folder: your own loop loads its data itself.")
    load_loop(reference)
    return LoopProgram(reference, scratch)
