"""The main function of a worker of `paceline train`: trains the task's model under an algorithm's program."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.algorithms import Algorithm
from paceline.data.plan import BatchPlan
from paceline.data.shared import DatasetHandle, open_dataset
from paceline.data.sources import BatchClaims, DatasetBatches
from paceline.errors import RunStopped, WorkerLostError
from paceline.loop.task_replica import TaskReplica
from paceline.membership.environment import SupervisedEnvironment, current_environment
from paceline.model_parallel.layouts import division_of, layout_of
from paceline.optim.shared_state import shared_state_of
from paceline.run.config import TrainConfig
from paceline.tasks.base import fetch
from paceline.tasks.load import load_task
from paceline.worker.memberships.membership import LoopState
from paceline.worker.memberships.supervised import SupervisedMembership

_build_lock = threading.Lock()  # worker threads share torch's global generator


@dataclass(frozen=True)
class TaskWorker:
    """A worker's main function, as data that can be sent to a process."""

    config: TrainConfig  # the run's, with the task's defaults filled in
    algorithm: Algorithm  # how the workers agree, with any delay
    plan: BatchPlan
    dataset: DatasetHandle

    def __call__(self) -> None:
        """Trains until the batches end or the run is stopped."""
        config, algorithm, environment = self.config, self.algorithm, current_environment()
        assert isinstance(environment, SupervisedEnvironment)
        task = load_task(config.task)
        with _build_lock:
            model = task.new_model(config.seed)
            seed = hash((config.seed, environment.worker_id, environment.incarnation)) & (2**63 - 1)
            if environment.worker_id or environment.incarnation:  # worker 0 continues as plain training would
                torch.manual_seed(seed)
            if config.backend == "processes":  # forks of one process, which begin with equal states
                np.random.seed(seed % 2**32)
        shared = config.optimizer_state == "shared"
        state = shared_state_of(config.make_optimizer, model) if shared else {}
        run = SupervisedMembership(
            environment,
            model,
            algorithm,
            shared_state=state,
            is_evaluated_elsewhere=True,
            layout=division_of(layout_of(config.layout)) if config.layout else None,
        )
        run.tell_epoch(self.plan.num_samples)
        with contextlib.ExitStack() as stack:
            stack.push(lambda kind, *_: run.close(failed=kind is not None))
            train_set = open_dataset(self.dataset, environment.handles)
            share = run.batches()
            claims = BatchClaims(
                self.plan,
                worker_id=environment.worker_id,
                lockstep=algorithm.lockstep,
                counter=run.arena.address("next_batch"),
                max_epochs=config.epochs,
                max_steps=config.steps,
                done=share.done,
                left=share.left,
                tracks=algorithm.survivors_continue,
                survivors=share.survivors,
            )

            def on_epoch(epoch: int, first: bool) -> None:
                number = epoch * self.plan.batches_per_epoch
                run.save_epoch(epoch, number, LoopState(replica.optimizer, claims.taken - 1), parameters=first)

            def save_end() -> None:
                if (left := claims.left()) is not None or claims.deal is None:
                    run.save_end(LoopState(replica.optimizer, claims.taken, left))

            def without_batch() -> None:
                assert run.part is not None
                assert run.part.without_batch is not None
                run.part.without_batch(fetch(train_set, torch.arange(1))[0])

            replica: Any = TaskReplica(
                model,
                task.loss,
                config.make_optimizer,
                DatasetBatches(train_set, claims, on_epoch),
                shares_state=shared,
                **run.base_arguments(),
            )
            replica.shares, replica.deal = claims.shares, claims.deal
            replica.without_batch = without_batch if run.part is not None else None
            claims.taken = run.restore(replica.optimizer, replica.expect_state)
            run.share_state(replica.optimizer)
            try:
                given = run.enter(-1)
            except RunStopped:  # a replacement that comes too late
                return
            if given:
                claims.enter(given["deal"])
                replica.enter(given)
            model.train()
            try:
                with torch.no_grad():
                    algorithm.work(replica, run.ports)
            except WorkerLostError:
                claims.taken -= 1
                if run.saves_after_loss:
                    save_end()
                raise
            except RunStopped:  # while waiting for others: the current batch was not trained on
                claims.taken -= 1
                if not algorithm.in_rounds and replica.batch >= 0:
                    run.arena.epoch_claims().hold(run.worker_id, replica.batch)
            save_end()
