"""A worker under a layout: `attach` cuts the model over the workers of its group, and leaves with the whole one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from paceline.algorithms import Algorithm
from paceline.errors import RunStopped, UsageError
from paceline.loop.sharded import SEES_A_PART
from paceline.membership.environment import LaunchedEnvironment, SupervisedEnvironment, WorkerEnvironment
from paceline.membership.final_mean import LeftWeights
from paceline.model_parallel.hybrid.choose import checked_layout, counted_s
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.model_parallel.hybrid.worker_part import check_optimizer_of
from paceline.model_parallel.layouts import AnyLayout, check_layout, division_of
from paceline.model_parallel.tensor.layout import TensorParallel
from paceline.model_parallel.tensor.worker_part import check_model
from paceline.optim.several_optimizers import SeveralOptimizers
from paceline.worker.memberships.entry import Entry
from paceline.worker.memberships.layout_part import ShardedLayoutPart
from paceline.worker.memberships.membership import Membership
from paceline.worker.user_evaluation import Evaluate
from paceline.worker.worker import Worker

_CHANGED = (
    "Under a layout each worker has only the gradients of its own shards, so changes that a loop makes to them"
    " between backward and step would differ between workers: clip by worker.clip_grad_norm_(max_norm), and leave out"
    " GradScaler and other changes."
)


class ShardedWorker(Worker):
    """One worker of a run whose model is cut, as its loop sees it.

    Inside the `with`, cut layers' parameters have the shapes of the worker's shards; afterwards model and optimizer are whole
    again on all workers. Weights that worker 0's loop loads after its last step do not become the run's result here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        environment: WorkerEnvironment | None,
        evaluate: Evaluate | None = None,
        *,
        layout: AnyLayout,
        example_inputs: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        super().__init__(model, optimizer, algorithm, environment, evaluate, **others)
        check_layout(layout, algorithm)
        if isinstance(optimizer, SeveralOptimizers):
            raise UsageError("A layout takes one optimizer: make one with several groups of parameters.")
        check_optimizer_of(optimizer)
        if not isinstance(environment, SupervisedEnvironment | LaunchedEnvironment | None):
            raise UsageError(
                "A layout needs all of its workers from the first step to the last: start them with paceline.launch or"
                " torchrun, not with --join or in a simulation."
            )
        # Report errors before waiting for other workers.
        if isinstance(layout, TensorParallel):
            if example_inputs is not None:
                raise UsageError("Only hybrid(groups=auto) uses example_inputs: leave them out.")
            if self.num_workers == 1:
                layout = TensorParallel(line=1)  # as outside any launcher, for trying a loop alone
            layout.replicas(self.num_workers)
            check_model(model, layout.shape)
        else:
            if self.num_workers == 1:
                layout = replace(layout, groups=1)  # likewise
            layout = checked_layout(
                layout,
                model,
                example_inputs,
                workers=self.num_workers,
                batch_size=0 if example_inputs is None else len(example_inputs),
                compute_s=counted_s,
            )
        self.layout = layout  # with its groups chosen

    def _join(self, entry: Entry, states: tuple[int, ...]) -> Membership:
        join: Any = entry.join  # each of the remaining memberships takes a layout
        run: Membership = join(self._model, self.algorithm, states, self._evaluate, layout=division_of(self.layout))
        self._undo.append(self._part_of(run).remove)
        return run

    @staticmethod
    def _part_of(run: Membership) -> ShardedLayoutPart:
        return cast(ShardedLayoutPart, run.part)

    def _begin(self) -> None:
        self._undo.append(self._optimizer.register_step_pre_hook(self._check_gradients).remove)
        super()._begin()
        part = self._part_of(self._membership)
        replica = self._replica
        part.repeats = lambda: replica.repeats
        if part.pending is not None:
            self._replica.wait_for_sums(part.pending)

    def _check_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        replica = self._replica
        has_changed = self._part_of(self._membership).has_changed_gradients() and not replica.step_gradient.has_returned
        if hasattr(optimizer, "found_inf") or replica.step_gradient.has_changed or has_changed:
            raise UsageError(_CHANGED)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """As in `Worker`; under `hybrid` every pass sends its gradients: cut layers weight each pass's rows separately."""
        with contextlib.nullcontext() if isinstance(self.layout, HybridParallel) else super().accumulate():
            yield

    def clip_grad_norm_(self, max_norm: float) -> float:
        """As in `Worker`: every parameter of the model counts once, whichever worker holds it."""
        if self.algorithm.splits_update and self._replica.step_gradient.has_returned:
            raise UsageError(SEES_A_PART)
        norm = self._part_of(self._membership).clip(max_norm)
        self._replica.step_gradient.accept_changes()
        return norm

    def _saves_model_as_left(self) -> bool:
        return False  # saves only this worker's parts, also of the optimizer's state

    def _left_by_loop(self) -> LeftWeights | None:
        return None

    def _load_final(self, left: LeftWeights | None) -> None:
        run, part = self._membership, self._part_of(self._membership)
        if not run.stopped():
            with contextlib.suppress(RunStopped):  # then it keeps this worker's part
                part.make_state_whole(self._optimizer)
        super()._load_final(left)
        run.make_whole(part)
