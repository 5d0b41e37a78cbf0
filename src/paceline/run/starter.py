"""Starts a run's workers and servers, each in a process or a thread of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.algorithms import Algorithm, registry
from paceline.membership.environment import SupervisedEnvironment
from paceline.memory.placement import placement_registry
from paceline.run.earlier_part import EarlierPart
from paceline.run.fork_server import fork_server_context
from paceline.run.loops import Loop
from paceline.worker.server_process import ServerMain
from paceline.worker.supervised import WorkerState, pickled, start_process, start_thread


class Starter:
    """Starts workers and servers."""

    def __init__(self, loop: Loop, folder: Path | None, earlier: EarlierPart) -> None:
        config = loop.config
        self._function = loop.function
        self.own_processes = config.backend == "processes"
        self._pickled = pickled(loop.function) if self.own_processes else b""
        dataset = loop.task.dataset if loop.task is not None else None
        self._handles = (dataset.fd,) if dataset is not None else ()
        self.environment = SupervisedEnvironment(
            num_workers=config.workers,
            seed=config.seed,
            min_workers=config.min_workers,
            checkpoint=folder / "checkpoint" if folder is not None else None,
            resume=earlier.checkpoint,
            placement=config.placement,
            pin=placement_registry.build(config.placement).pin,
            intra_op_threads=config.intra_op_threads,
            goal=loop.goal if loop.goal.any or folder is not None else None,
            slow=config.slow or {},
            batches_done=earlier.batches_done,
            done_before=earlier.done_before,
            plan=loop.plan,
            step_deadline_s=loop.step_deadline_s,
        )
        self._context = fork_server_context()

    def start(
        self, worker: WorkerState, algorithm: Algorithm | None, *, taken: int = 0, server: ServerMain | None = None
    ) -> None:
        """Starts a worker or a dead one's replacement; with `server`, a server or the second copy of a shard.

        `taken`: batches that the dead ones have trained on.
        """
        worker.connection, theirs = self._context.Pipe(duplex=True)
        worker.ready = worker.lost = worker.ended = False
        environment = replace(
            self.environment,
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            algorithm=registry.spec(algorithm) if algorithm and not algorithm.same_batches else None,
            taken=taken,
            pin=self.environment.pin and server is None,
        )
        handles = self._handles if server is None else ()
        if self.own_processes:
            content = self._pickled if server is None else pickled(server)
            start_process(worker, self._context, content, environment, handles, theirs)
        else:
            start_thread(worker, server or self._function, environment, handles, theirs)
