"""One worker of a run, as the user's loop sees it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from paceline.algorithms import Algorithm
from paceline.errors import DivergedError, PacelineError, RunStopped, UsageError, WorkerLostError, exits_in_order
from paceline.loop.grad_scaler import ask_for_every_step
from paceline.loop.guards.gradient_watch import GradientWatch
from paceline.loop.guards.guard import Guards
from paceline.loop.guards.held_by_one import hold
from paceline.loop.guards.hidden_hooks import leave_out_of_copies
from paceline.loop.guards.loaded_weights import Loads, Places, left_weights
from paceline.loop.guards.never_stepped import StepsAwaited
from paceline.loop.guards.outside_changes import watch_outside
from paceline.loop.guards.same_inputs import SameInputs
from paceline.loop.guards.trained_parameters import TrainedParameters
from paceline.loop.looked_up_tables import LookedUpTables, looked_up_tables
from paceline.loop.random_numbers import alike, common_randomness, digests_of_states, go_apart
from paceline.membership.environment import WorkerEnvironment
from paceline.membership.final_mean import FinalMean, LeftWeights
from paceline.optim.several_optimizers import SeveralOptimizers, members_of
from paceline.records.summary import own_figures
from paceline.system.interrupts import Terminated
from paceline.system.pages import give_back_freed
from paceline.system.torch_internals import mark_as_stepped
from paceline.worker.batches import WorkerBatches
from paceline.worker.initial_states import check_states
from paceline.worker.memberships.entry import Entry, enter
from paceline.worker.memberships.membership import Membership
from paceline.worker.user_batches import Batches
from paceline.worker.user_evaluation import Evaluate
from paceline.worker.whole_run import WholeRun

_LOCK_DEADLINE_S = 20.0  # less than a supervisor waits for its workers to end
_BETWEEN_TRIES_S = 1e-3


class Worker(WholeRun):
    """One worker of a run, as the user's loop sees it; a context manager.

    Attributes:
        worker_id: 0 to num_workers - 1; if workers join a run, known only inside the `with`, like `num_workers`.
        num_workers: workers of the run.
    """

    program: ClassVar[Algorithm | None] = None  # instead of an algorithm that the user names

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        environment: WorkerEnvironment | None,
        evaluate: Evaluate | None = None,
        *,
        same_random: bool = False,
    ) -> None:
        place = environment or WorkerEnvironment()
        self.worker_id, self.num_workers = place.worker_id, place.num_workers
        self.algorithm = algorithm
        self._model = self._held = model
        self._optimizer = optimizer
        self._environment = environment
        self._evaluate = evaluate
        self._same_random = same_random
        self._guards = Guards()
        self._undo: list[Callable[[], None]] = [self._guards.close]
        self._copy: torch.Tensor | None = None
        self._replica: Any = None  # an AttachedReplica, once the `with` is entered
        self._lookups: LookedUpTables | None = None
        self._consensus_distance: float | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is, and so where its batches belong."""
        return next((p.device for p in self._model.parameters() if p.requires_grad), torch.device("cpu"))

    def __enter__(self) -> Worker:
        entry = self._enter()
        self.worker_id, self.num_workers = entry.worker_id, entry.num_workers
        device = self.device
        states = digests_of_states(device) if self.num_workers > 1 and not self._same_random else ()
        self._undo.append(hold(self._held, members_of(self._optimizer), self.worker_id, self.num_workers))
        try:
            if self.num_workers > 1:
                self._guards.add(TrainedParameters(self._held, members_of(self._optimizer)))
            self._membership = self._join(entry, states)
        except BaseException:
            self._undo.pop()()
            self._guards.close()
            raise
        try:
            self._draw_apart(device)
            self._begin()
        except BaseException:  # such as the run's end, while this worker waited to see the parameters
            self._leave(failed=True)
            raise
        return self

    def _enter(self) -> Entry:
        return enter(self._environment, self._model, self.algorithm)

    def _join(self, entry: Entry, states: tuple[int, ...]) -> Membership:
        return entry.join(self._model, self.algorithm, states, self._evaluate)

    def _draw_apart(self, device: torch.device) -> None:
        """Reseeds random generators that start in the same state on every worker, except for the first worker 0's."""
        run = self._membership
        rows = run.tables.states.rows() if run.random_states else None
        self._randomness = common_randomness(device, rows, run.random_states)
        if run.random_states and (run.draws_as or run.incarnation):
            equal = alike(rows, run.random_states)
            go_apart(device, run.random_states, equal, run.draws_as, run.incarnation, run.resumed_from)

    def _begin(self) -> None:
        run, members = self._membership, members_of(self._optimizer)
        parameters = run.binding.parameters
        if run.part is None:
            run.binding.find_tables(self._model)
        taken = self._restore(run)
        check_states(run, self.algorithm, self._optimizer, self._held)
        self._replica = replica = run.replica(self._optimizer)
        replica.step_hooks.guards = self._guards
        self._loads = Loads(self._model)
        self._guards.add(self._loads)
        replica.outside = watch_outside(run.binding, run.ports.shared, self.algorithm, self._loads, self.num_workers)
        if run.ports.num_servers:
            replica.lookups = self._lookups = looked_up_tables(self._model, run.binding)
        if self._lookups is not None:
            self._lookups.is_stepping = lambda: replica.is_applying
            self._lookups.raise_if_stopped = replica.raise_if_stopped
            self._lookups.on_change = replica.outside.leave_out
        if run.part is None and len(members) == 1:
            replica.step_hooks.evaluates = self.algorithm.closures(self.num_workers)
        if self.worker_id == 0 and not run.incarnation:
            self.algorithm.warn(self.num_workers, stacklevel=4)
            in_turn = isinstance(self._optimizer, SeveralOptimizers) and self._optimizer.in_turn
            own = self.algorithm.clips_before_the_mean or (in_turn and self.algorithm.averages_in_backward)
            if self.num_workers > 1 and own:
                self._guards.add(GradientWatch(parameters, in_turn=in_turn))
        if isinstance(self._optimizer, SeveralOptimizers):
            self._undo.append(self._optimizer.watch(parameters))
        self._undo += [ask_for_every_step(one) for one in members]
        replica.start(lambda: self.algorithm.work(replica, run.ports))
        for one in members:
            self._undo.append(one.register_step_pre_hook(replica.step_hooks.before).remove)
            self._undo.append(one.register_step_post_hook(replica.step_hooks.after).remove)
        inputs = None
        if self.num_workers > 1 and not self._same_random and run.dealt[1] == self.num_workers:
            inputs = SameInputs(run.tables.inputs, self.worker_id, self.num_workers)
        replica.watch(self._model, inputs)
        progress = self._begin_progress()
        self._places = Places(self._model, parameters)
        if self._places.buffers:
            self._guards.add(self._places)
        if self.algorithm.needs.kind == "slots" and self.num_workers > 1:
            replica.rest, self._loads.before = self._bind_newest, replica.leave_published
        self._undo.append(leave_out_of_copies(self._model))
        self._batches = WorkerBatches(
            membership=run,
            algorithm=self.algorithm,
            replica=replica,
            optimizer=self._optimizer,
            taken=taken,
            progress=progress,
            bind_newest=self._bind_newest,
            randomness=self._randomness,
        )
        self._undo.append(self._batches.close)
        self._bind_newest()
        if self._lookups is not None and self._lookups.ranges:
            give_back_freed()  # the model's own tables
        if self.num_workers > 1 and self.algorithm.averages_in_backward and not run.incarnation:
            self._undo.append(replica.run_ahead())
        replica.awaited = StepsAwaited(parameters)
        if run.deals_batches or self.num_workers > 1:
            for one in members:
                mark_as_stepped(one)

    def _restore(self, run: Membership) -> int:
        """Restores optimizer and model from the checkpoint, if any; returns the batches taken so far."""
        return run.restore(self._optimizer)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> bool:
        """Leaves the run. If the run ended while the loop waited, execution continues after the `with`."""
        is_cut = kind is not None and issubclass(kind, RunStopped)
        failed = kind is not None and not (is_cut or exits_in_order(details[0]))
        if not (failed or is_cut) and isinstance(self._optimizer, SeveralOptimizers):
            try:
                self._optimizer.check_whole()
            except UsageError:
                self._leave(failed=True)
                raise
        if self._is_ended_from_outside(kind):
            self._save_end(is_cut=True, is_lost=True)
        self._leave(failed=failed or self._membership.is_terminated, is_cut=is_cut)
        return is_cut

    def _is_ended_from_outside(self, kind: type[BaseException] | None) -> bool:
        """Whether a lost worker or SIGTERM ends this one, whose last step is sound; other errors of ours question it."""
        if kind is not None and issubclass(kind, PacelineError):
            return issubclass(kind, WorkerLostError)
        return self._membership.is_terminated

    def _leave(self, *, failed: bool, is_cut: bool = False) -> None:
        left = self._left_by_loop() if not (failed or is_cut) else None
        never_stepped = self._never_stepped() if not (failed or is_cut) else None
        while self._undo:
            self._undo.pop(0)()
        self._leave_sums()
        try:
            if self._replica is not None:
                self._replica.end(failed=failed or is_cut)
            if not failed:
                if not self._saves_model_as_left():
                    self._save_end(is_cut=is_cut)
                if self._replica is not None and not self._membership.stopped():
                    self._replica.make_state_whole(self._membership.ports.collectives)
                self._load_final(left)
                if self._saves_model_as_left():
                    self._save_end(is_cut=is_cut)
                if never_stepped is not None and not self._membership.has_updates():
                    raise never_stepped
        except (Terminated, WorkerLostError):
            self._save_end(is_cut=False, is_lost=True)
            raise
        finally:
            if self._lookups is not None:
                self._lookups.give_up()
            self._membership.close(failed=failed)

    def _never_stepped(self) -> UsageError | None:
        replica = self._replica
        if replica is None or replica.awaited is None or self._membership.stopped():
            return None
        return replica.awaited.error(loaded=self._loads.were_any, has_begun=replica.step > 0)

    def _save_end(self, *, is_cut: bool, is_lost: bool = False) -> None:
        """Saves the worker's part of the run's last checkpoint, if there are any; `is_lost`: others do not save theirs."""
        if is_lost and not self._membership.saves_after_loss:
            return
        if is_cut and self._replica.is_applying and self._membership.saves_after_loss:
            return  # between two evaluations of a closure, which move the parameters
        # A loop that gets no further batch ends by itself, perhaps between two passes of a step.
        at_end = self._batches.at_end(is_cut=is_cut or self._membership.stopped())
        if at_end is not None:
            save = self._membership.save_after_loss if is_lost else self._membership.save_end
            save(at_end)

    def batches(self, loader: Iterable[Any], *, own: bool = False, device: torch.device | str | None = None) -> Batches:
        """This worker's batches; an epoch is shared: each sample goes to one worker, once.

        Asynchronous algorithms give the next batch to any free worker; lockstep ones deal in rounds. Each iteration is the
        next epoch; other workers get what is left after a `break`. All workers need the same loader: a `DataLoader`, a
        sequence of batches, or another iterable, which each worker reads as a whole. With `own`, the worker gets all of the
        loader's batches, as is right if ranks have divided the data.

        With `device`, all tensors of a batch are moved there: to a GPU while it still computes the step before, if the loader
        has `pin_memory=True`.

        Raises:
            UsageError: when iterated: the workers' data differ, or cannot be shared.
        """
        return Batches(loader, self._batches, self._replica.takes_batches, own=own, device=device)

    def _defer_steps(self) -> deque[tuple[int, Callable[[], None]]]:
        self._batches.deferred = deferred = deque()
        return deferred

    def report(self, loss: torch.Tensor | float, samples: int | None = None) -> None:
        """Reports this step's loss, for curves and targets; ends the run as diverged if the loss is not finite.

        Call it before or after `optimizer.step()`, but before the next batch is fetched or the model is called again.

        Args:
            loss: of this step.
            samples: of this step, if the model's inputs do not show them. If told before `step()` (under all-reduce before
                `backward()`), they are also the step's weight in means.

        Raises:
            DivergedError: the loss is not finite.
        """
        value = loss.item() if isinstance(loss, torch.Tensor) else loss
        step = self._note_loss(value, samples)
        if not math.isfinite(value):
            raise DivergedError(f"The loss became {value} at step {step}.")

    def _note_loss(self, loss: float, samples: int | None) -> int:
        return self._replica.report(loss, samples)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Marks micro-batches whose backward pass only adds to the gradients: `with worker.accumulate(): loss.backward()`.

        Methods that average gradients send them during backward; without this they do so in every pass, which is correct but
        costs more communication. A step whose passes were all marked sends everything when the optimizer steps.
        """
        self._replica.accumulates = True
        try:
            yield
        finally:
            self._replica.accumulates = False

    def summary(self) -> dict[str, Any]:
        """This worker's own figures once the `with` has ended, as `result.json` names them, and `consensus_distance`.

        Empty if a supervisor records the run (`launch`): its result has the figures of all workers.
        """
        records = self._membership.own_records()
        if records is None:
            return {}
        figures = own_figures(records, self._membership.ports.counts.unresolved_exchanges, gossip=self.algorithm.gossip)
        figures |= self.algorithm.figures(self._membership.ports.counts.delay, self.num_workers)
        return {**figures, "consensus_distance": self._consensus_distance}

    # Parameters at the beginning and at the end

    def _newest(self, *, whole: bool = True) -> torch.Tensor:
        """A copy of the newest parameters; unless `whole`, without tables whose rows are looked up."""
        if self._copy is None:
            self._copy = self._membership.binding.zeros()
        x, lookups = self._copy, self._lookups
        if whole or lookups is None or not lookups.ranges:
            self._membership.snapshot(x)
        else:
            self._membership.snapshot(x, lookups.ranges)
            lookups.outdate(x)
        return x

    def _bind_newest(self) -> None:
        self._replica.settle_outside()
        self._membership.binding.bind(self._newest(whole=False))
        self._replica.outside.take(idle=True, whole=True)

    def _left_by_loop(self) -> LeftWeights | None:
        """The weights that the leading worker's loop has loaded into its model after its last step; None: none."""
        if not self._membership.leads or self._replica is None:
            return None
        has_changed = self.num_workers == 1 or self._replica.outside.found()
        return left_weights(self._membership.binding, self._places, self._loads, has_changed=has_changed)

    def _final_model(self, left: LeftWeights | None) -> tuple[torch.Tensor, FinalMean | None]:
        """The run's model (P,). Retries when a lock is taken: after the run's end waits for locks raise `RunStopped`."""
        until_s = time.monotonic() + _LOCK_DEADLINE_S
        while True:
            try:
                final = self._newest()
                if self.num_workers == 1 and left is not None and torch.equal(left.x, final):
                    left = None
                return final, self._membership.final_model(final, self._batches.given, left)
            except RunStopped:
                if time.monotonic() > until_s:
                    raise
                time.sleep(_BETWEEN_TRIES_S)

    def _load_final(self, left: LeftWeights | None) -> None:
        final, mean = self._final_model(left)
        self._consensus_distance = mean.consensus_distance if mean is not None else None
        self._membership.binding.rebind(final)
        if self._lookups is not None:
            self._lookups.end()
        self._places.write_back()
        self._membership.write_end(self._model, mean)
