"""A worker's access to the whole run: its progress, schedules that follow it, and sums over all workers."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from paceline.algorithms import Algorithm
from paceline.errors import UsageError
from paceline.loop.guards.guard import Guards
from paceline.loop.guards.state_elsewhere import StateElsewhere
from paceline.loop.guards.unfollowed_schedules import SkippedEpochs, UnfollowedSchedules
from paceline.loop.run_progress import RunProgress
from paceline.loop.schedules import FollowedScheduler
from paceline.optim.clipping import clip_grad_norm
from paceline.optim.several_optimizers import SeveralOptimizers, members_of
from paceline.worker.batches import WorkerBatches
from paceline.worker.gathering import total_of
from paceline.worker.memberships.membership import Membership

_Value = TypeVar("_Value", float, torch.Tensor)


class WholeRun:
    """The part of a `Worker` that concerns all workers."""

    worker_id: int
    num_workers: int
    algorithm: Algorithm
    _optimizer: torch.optim.Optimizer
    _membership: Membership
    _replica: Any
    _guards: Guards
    _batches: WorkerBatches

    _progress: RunProgress | None = None
    _unfollowed: tuple[UnfollowedSchedules, ...] = ()

    def _begin_progress(self) -> RunProgress:
        """Counts progress from now on, and watches for schedules that do not follow it."""
        run = self._membership
        num_sharing = 1 if self.algorithm.same_batches else run.dealt[1]
        self._progress = RunProgress(
            worker_id=self.worker_id,
            num_workers=num_sharing,
            lockstep=self.algorithm.lockstep,
            table=run.tables.progress if 1 < num_sharing == self.num_workers else None,
            before=run.done_before,
        )
        self._replica.progress = self._progress
        if self.num_workers > 1 and not self.algorithm.same_batches:
            self._guards.add(StateElsewhere(members_of(self._optimizer), self.algorithm))
        if self.worker_id == 0 and (num_sharing > 1 or (run.resumed_from and not self.algorithm.same_batches)):
            self._unfollowed = tuple(UnfollowedSchedules(one, num_sharing) for one in members_of(self._optimizer))
            for one in self._unfollowed:
                self._guards.add(one)
        if (run.resumed_from and self.worker_id == 0) or (run.incarnation and not self.algorithm.lockstep):
            self._guards.add(SkippedEpochs(members_of(self._optimizer)))
        return self._progress

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales the gradients so that their total norm is at most `max_norm`; returns the norm before.

        Use it instead of `torch.nn.utils.clip_grad_norm_`, which under a layout would see only this worker's part, and which
        does not take sparse gradients.
        """
        return clip_grad_norm(self._membership.binding.parameters, max_norm)

    @property
    def progress(self) -> int:
        """Samples of the whole run so far, over all workers; use it to compute a learning rate yourself.

        With `rate = f(worker.progress / samples_per_step)`, one step on each of n workers advances the rate as far as n steps
        of a lone worker. In lockstep it is the same on all workers. Under torchrun or `--join`, a worker of an asynchronous
        method that fetches its own batches assumes that the others are as fast as itself. Dropped gradients count.
        """
        self._silence_schedules()
        return self._progress.samples if self._progress is not None else 0

    def follow(self, scheduler: Any, *, samples_per_step: int | None = None) -> Any:
        """Steps a scheduler by the run's steps, so that it ends as with one worker: `scheduler = worker.follow(scheduler)`.

        For schedulers that are stepped once per step of the optimizer, such as OneCycleLR or a warm-up and a cosine. The loop
        may keep calling the returned scheduler's `step`, which does nothing. A scheduler that is stepped once per epoch needs
        no `follow`.

        Args:
            scheduler: of the optimizer that was attached; not ReduceLROnPlateau.
            samples_per_step: samples in one step of a loop with one worker. Give it if the loop divides its batches by the
                number of workers: the scheduler is then at step `worker.progress / samples_per_step`. None: every worker's
                step counts as a step.

        Returns:
            the scheduler, with a `step` that does nothing; `load_state_dict` resumes from the saved step.

        Raises:
            UsageError: the scheduler depends on a metric, or the `with` has not been entered.
        """
        if self._progress is None:
            raise UsageError("worker.follow needs the run: call it inside `with paceline.attach(...) as worker:`.")
        if samples_per_step is None and isinstance(self._optimizer, SeveralOptimizers) and self._optimizer.in_turn:
            raise UsageError(
                "When optimizers step in turn, worker.follow cannot tell how many of the run's steps make one step of "
                "the scheduler: give samples_per_step, the number of samples in one step of a loop with one worker."
            )
        self._silence_schedules()
        progress = self._progress
        followed = FollowedScheduler(
            scheduler,
            (lambda: progress.steps) if samples_per_step is None else (lambda: progress.samples / samples_per_step),
        )
        self._replica.on_progress.append(followed.advance)
        return followed

    def sum(self, value: _Value) -> _Value:
        """The sum of all workers' values: numbers, or tensors of equal shape; the same bits on every worker.

        All workers call it equally often, for example after each epoch; each waits for the others. Workers whose loops have
        ended, or that have died, contribute nothing and are not waited for. A dead worker's replacement gets only its own
        value until it has a batch. Integer tensors become int64. Costs some milliseconds; on one machine it goes through the
        launcher, otherwise through the store at which the workers met: it is for figures, not for parameters.

        Raises:
            UsageError: the shapes differ, or workers may come and go (`--join`).
            WorkerLostError: a worker did not call it within PACELINE_DEADLINE_S (600 s).
        """
        return total_of(self._gathered(value))

    def mean(self, value: _Value) -> _Value:
        """The mean of the participating workers' values; otherwise as `sum`."""
        values = self._gathered(value)
        return total_of(values) / len(values)

    def _gathered(self, value: Any) -> list[Any]:
        if isinstance(value, torch.Tensor):
            value = value.detach()
        if self._progress is None:
            raise UsageError("worker.sum and worker.mean need the run: call them inside `with paceline.attach(...)`.")
        if self.num_workers == 1 or self._batches.is_behind:
            return [value]
        self._batches.take_part()  # also in a loop with batches of its own
        if self._replica.before_meeting is not None:
            self._replica.before_meeting()
        gather = self._membership.gatherer.gather
        if not isinstance(value, torch.Tensor):
            return gather(value)
        return [one.to(value.device) for one in gather(value.cpu())]

    def _saves_model_as_left(self) -> bool:
        return self.algorithm.gossip  # the worker's own model is part of what it saves

    def _leave_sums(self) -> None:
        if self._progress is not None and self.num_workers > 1:
            self._membership.gatherer.leave()

    def _silence_schedules(self) -> None:
        if self._progress is not None:
            self._replica.rates_may_differ = True
        for one in self._unfollowed:
            one.silence()
