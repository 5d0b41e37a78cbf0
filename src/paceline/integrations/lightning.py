"""A strategy for Lightning's Trainer: the workers that a launcher has started train one model with an algorithm.

`Trainer(strategy=PacelineStrategy("ad-psgd"))` under `paceline launch`, `pl.launch` or torchrun; importing this module also
registers the name, `Trainer(strategy="paceline")`. Needs the extra `paceline[lightning]`.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from paceline.algorithms import Algorithm, parse
from paceline.errors import RunStopped, UsageError
from paceline.integrations.lightning_internals import (
    combined_loader,
    forget_loader,
    keep_sampler,
    set_sigterm_broadcast,
    set_weight_of_logs,
)
from paceline.integrations.lightning_parts import RunSchedule, SharedLoader, bring_together, reduced
from paceline.integrations.lightning_words import in_lightnings_words
from paceline.membership.environment import WorkerEnvironment, current_environment
from paceline.system.torch_internals import SCALES_IN_STEP
from paceline.worker.attach import attach
from paceline.worker.memberships.entry import meeting_beside
from paceline.worker.worker import Worker

try:
    from lightning.pytorch.callbacks import ModelCheckpoint  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.utilities import rank_zero_only  # pyright: ignore[reportMissingImports]
    from torchmetrics import Metric  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise UsageError("The strategy for Lightning needs its package: pip install 'paceline[lightning]'.") from error

# State of a ModelCheckpoint about its files, which are worker 0's.
_OF_FILES = (
    "best_model_path",
    "best_model_score",
    "best_k_models",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)


class PacelineStrategy(ParallelStrategy):
    """Every worker runs the same `Trainer.fit`; optimizer steps go through `attach`, and workers divide each epoch's batches.

    Each training sample is used once per epoch; validation and test run completely on every worker. With lockstep methods
    all workers have the same number of batches: a worker without a batch in the last round repeats one with weight 0.
    Schedulers per step follow the run's steps; those per epoch are Lightning's. When `fit` returns, all workers have the
    run's model. If a worker dies under a method that tolerates it, the others' `fit` continues.

    `barrier`, `broadcast`, `reduce` and `all_gather` cover all workers, and so do metrics with `sync_dist=True`, metrics of
    torchmetrics, and early stopping. During training each worker has its own value, and a warning says so once, if workers do
    not wait for each other, or join and leave (`--join`). Worker 0 writes files: a checkpoint of `ModelCheckpoint` during
    training has worker 0's current parameters.

    Without a launcher, Lightning trains as with its own strategy.

    Costs: those of the algorithm, and of `attach` per step.
    Not: several loaders of training batches at once, with several workers; more than one device per worker. Fabric takes
    `attach` itself.

    Args:
        algorithm: a spec or an instance; None: what the launcher says.
        device: of this worker's model.
        **base: `accelerator`, `checkpoint_io` and `precision_plugin`, from Lightning.

    Raises:
        UsageError: the extra is missing, or `attach` rejects the run.
    """

    strategy_name = "paceline"
    #: The strategy of this process, which metrics use; metrics themselves are copied and pickled.
    _running: ClassVar[PacelineStrategy | None] = None

    def __init__(
        self, algorithm: Algorithm | str | None = None, device: torch.device | str = "cpu", **base: Any
    ) -> None:
        super().__init__(**base)
        environment = current_environment()
        place = environment or WorkerEnvironment()
        self.algorithm = parse(algorithm) if isinstance(algorithm, str) else algorithm
        self._root_device = torch.device(device)
        self._is_alone = environment is None
        self._global_rank, self._local_rank, self._world_size = place.worker_id, place.local_rank, place.num_workers
        self._meeting = meeting_beside(environment, self._is_stopped)
        self._trainer: Any = None
        self._worker: Worker | None = None
        self._deferred: deque[tuple[int, Callable[[], None]]] = deque()
        self._races = False  # workers that do not wait for each other are training
        self._was_warned = False
        rank_zero_only.rank = self.global_rank

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_meeting": None, "_deferred": deque()}

    @property
    def root_device(self) -> torch.device:
        return self._root_device

    @property
    def global_rank(self) -> int:
        return self._global_rank

    @property
    def local_rank(self) -> int:
        """Lightning uses it to choose the worker that prepares the data."""
        return self._local_rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def is_distributed(self) -> bool:
        """Whether there are other workers; otherwise `sync_dist` does nothing."""
        return self.world_size > 1

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def connect(self, model: Any) -> None:
        """Like every strategy's; the workers connect later, once a checkpoint is loaded and the batches are known."""
        super().connect(model)
        self._trainer = trainer = model.trainer
        keep_sampler(trainer)
        if self.world_size > 1:
            PacelineStrategy._running = self
            set_sigterm_broadcast(trainer, is_on=False)

    def setup(self, trainer: Any) -> None:
        """Like every strategy's; from now on metrics and schedules follow the run."""
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        if self.world_size > 1:
            for metric in module.modules():
                if isinstance(metric, Metric):
                    metric.dist_sync_fn, metric.distributed_available_fn = _states_of_all, _metrics_are_common
        if not trainer.training:
            return
        if self.world_size > 1 and module.automatic_optimization:  # else the module steps its schedulers by itself
            for config in self.lr_scheduler_configs:
                if config.interval == "step" and not config.reduce_on_plateau:
                    RunSchedule(config, self._steps)
        if combined_loader(trainer) is not None:  # `estimated_stepping_batches` has asked for the epoch
            if self._is_alone:
                self._enter()
            else:
                forget_loader(trainer)

    def _steps(self) -> float:
        progress = self._worker._progress if self._worker is not None else None
        return progress.steps if progress is not None else 0

    def process_dataloader(self, dataloader: Any) -> Any:
        """The training loader, shared by the workers; other loaders unchanged."""
        if not self._trainer.training or not self.optimizers:
            return dataloader
        if self._worker is None:
            self._enter()
        if self._is_alone:
            return dataloader
        assert self._worker is not None
        return SharedLoader(dataloader, self._worker, self._deferred, self._stop)

    def _enter(self) -> None:
        unscaling = [one for one in self.optimizers if getattr(one, SCALES_IN_STEP, False)]
        assert isinstance(self.model, nn.Module)
        if len(self.optimizers) == 1:
            worker = attach(self.model, self.optimizers[0], self.algorithm)
        else:  # a step of any optimizer is a step: this also holds if all of them step after one backward pass
            worker = attach((self.model,), self.optimizers, self.algorithm)
        self._worker = worker.__enter__()
        if getattr(self.precision_plugin, "scaler", None) is None:
            for one in self.optimizers:  # Lightning does not clip if an optimizer says that it unscales gradients
                if getattr(one, SCALES_IN_STEP, False) and one not in unscaling:
                    setattr(one, SCALES_IN_STEP, False)
        if self._is_alone:
            return
        self._global_rank, self._world_size = worker.worker_id, worker.num_workers
        rank_zero_only.rank = self.global_rank
        worker._silence_schedules()
        worker._leave_sums = lambda: None  # this worker still takes part in operations of all workers
        self._deferred = worker._defer_steps()  # Lightning may fetch one batch ahead, to know which is the last

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begins the batch's step; an optimizer may call `training_step` late in the step, and several times."""
        if not self._deferred:
            return
        samples, begin = self._deferred.popleft()
        if not samples:
            set_weight_of_logs(self._trainer, 0)
        try:
            begin()
        except RunStopped:
            self._stop()
            raise StopIteration from None  # the epoch ends

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().training_step(*args, **kwargs)
        except RunStopped:
            self._stop()
            return None

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self._worker.accumulate() if self._worker is not None else nullcontext():
            yield

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        except RunStopped:
            self._stop()
            return None

    def _stop(self) -> None:
        self._trainer.should_stop = True

    def _is_stopped(self) -> bool:
        return self._worker is not None and self._worker._membership.stopped()

    # Operations of all workers

    def barrier(self, name: str | None = None) -> None:
        self._all("barrier", None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The value of worker `src`: tensors, numbers, strings and containers of them."""
        return self._all("broadcast", obj if src == self.global_rank else None, own=obj).get(src, obj)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.world_size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        return reduced(self._tensors("reduce", tensor), reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = self._all("reduce_boolean_decision", bool(decision)).values()
        return min(votes) if all else max(votes)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all workers, stacked; raises UsageError if gradients should flow through it."""
        if self.world_size == 1:
            return tensor
        if sync_grads and tensor.requires_grad:
            raise UsageError(
                "Gradients do not flow from one worker to another: leave out sync_grads, and use the loss of this "
                "worker's own batch."
            )
        return torch.stack(self._tensors("all_gather", tensor))

    def _tensors(self, operation: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._has_common_moment()
        value = tensor.detach().cpu().clone()  # sending a view would send its whole storage
        return [one.to(tensor.device) for one in self._all(operation, value).values()]

    def _all(self, operation: str, value: Any, own: Any = None) -> dict[int, Any]:
        """All workers' values by worker; only this worker's own if they have no common moment."""
        alone = {self.global_rank: value if own is None else own}
        if self.world_size == 1 or self._meeting is None or self._races or self._is_stopped():
            return alone
        replica = self._worker._replica if self._worker is not None else None
        if replica is not None and replica.before_meeting is not None:
            replica.before_meeting()
        try:
            return bring_together(self._meeting, operation, self.global_rank, value)
        except RunStopped:
            self._stop()
            return alone

    def _has_common_moment(self) -> bool:
        """Whether all workers get here together; if not, warns once."""
        if self._meeting is not None and not self._races:
            return True
        if not self._was_warned and self.is_global_zero:
            self._was_warned = True
            warnings.warn(
                "Values logged during training are this worker's own, even with sync_dist=True or torchmetrics: the "
                "workers do not wait for each other.",
                stacklevel=2,
            )
        return False

    # The end

    def on_train_start(self) -> None:
        """The first batch follows: from now on, asynchronous methods have no common moment."""
        super().on_train_start()
        self._races = self._worker is not None and self.world_size > 1 and not self._worker.algorithm.lockstep

    def on_train_end(self) -> None:
        """Waits for workers that still train; then all know the files that worker 0 has written."""
        super().on_train_end()
        self._races = False
        for callback in self._trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                vars(callback).update(self.broadcast({name: getattr(callback, name) for name in _OF_FILES}))

    def on_exception(self, exception: BaseException) -> None:
        """Leaves the run as failed; rewords Paceline's errors for a module's author."""
        super().on_exception(exception)
        in_lightnings_words(exception)
        self._leave(exception)

    def teardown(self) -> None:
        """Leaves the run if it still takes part; then the module has the run's parameters."""
        self._leave(None)
        PacelineStrategy._running = None
        if self._trainer is not None:
            set_sigterm_broadcast(self._trainer, is_on=True)
        super(ParallelStrategy, self).teardown()  # ParallelStrategy's own deletes the launcher's environment variables

    def _leave(self, failure: BaseException | None) -> None:
        worker = self._worker
        if worker is None:
            return
        try:
            worker.__exit__(type(failure) if failure is not None else None, failure, None)
        finally:
            self._worker, self._races = None, False
            self._deferred.clear()
            for config in self.lr_scheduler_configs:
                if isinstance(config.scheduler, RunSchedule):
                    config.scheduler.end()
            loaders = combined_loader(self._trainer)
            if loaders is not None:
                own = [one.loader if isinstance(one, SharedLoader) else one for one in loaders.flattened]
                loaders.flattened = own


def _metrics_are_common() -> bool:
    return PacelineStrategy._running is not None and PacelineStrategy._running._has_common_moment()


def _states_of_all(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    assert PacelineStrategy._running is not None
    return PacelineStrategy._running._tensors("compute of a metric", state)


StrategyRegistry.register(
    "paceline", PacelineStrategy, description="Workers of a launcher agree as the algorithm says", override=True
)
