"""A strategy for Lightning's Trainer: the workers that a launcher has started train one model, agreeing as an algorithm says.

`Trainer(strategy=PacelineStrategy("ad-psgd"))` under `paceline launch`, `pl.launch` or torchrun; importing this module also
registers the name, `Trainer(strategy="paceline")`. Needs the extra `paceline[lightning]`.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from paceline.algorithms import Algorithm, parse
from paceline.errors import RunStopped, UsageError
from paceline.membership.environment import current_environment
from paceline.worker.attach import Worker, attach

try:
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.utilities import rank_zero_only  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise UsageError("The strategy for Lightning needs its package: pip install 'paceline[lightning]'.") from error

__all__ = ["PacelineStrategy"]


class PacelineStrategy(SingleDeviceStrategy):
    """Every worker runs the same `Trainer.fit`; their optimizer steps go through `attach`, their batches are one epoch's.

    Training batches are divided by the workers, each sample once per epoch; validation and test run whole on every worker.
    Schedulers per step follow the run's steps, those per epoch are Lightning's. When `fit` returns, all workers have the run's
    model. A worker that dies under a method that tolerates it does not end the others' `fit`.

    `self.log(..., sync_dist=True)` and early stopping are of all workers under lockstep methods, at the ends of epochs. Else
    there is no common moment: every worker has its own value, and this is said once. Files are worker 0's: a checkpoint of
    `ModelCheckpoint` during training has the parameters that worker 0 has then.

    Costs: those of the algorithm, and of `attach` per step.
    Not: LBFGS; several loaders of training batches at once; `reload_dataloaders_every_n_epochs`; more than one device per
    worker. Fabric takes `attach` itself.

    Args:
        algorithm: a spec or an instance; None: what the launcher says.
        device: of this worker's model.
        **base: `accelerator`, `checkpoint_io` and `precision_plugin`, as Lightning gives them.

    Raises:
        UsageError: the extra is missing; or what `attach` refuses.
    """

    strategy_name = "paceline"

    def __init__(
        self, algorithm: Algorithm | str | None = None, device: torch.device | str = "cpu", **base: Any
    ) -> None:
        super().__init__(device, **base)
        environment = current_environment()
        self.algorithm = parse(algorithm) if isinstance(algorithm, str) else algorithm
        self.global_rank = environment.worker_id if environment is not None else 0
        self.world_size = environment.num_workers if environment is not None else 1
        self._trainer: Any = None
        self._worker: Worker | None = None
        self._deferred: deque[Callable[[], None]] = deque()
        self._dealt: _Dealt | None = None
        self._was_warned = False
        rank_zero_only.rank = self.global_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker writes files and shows progress."""
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are others, without whom `sync_dist` has nothing to do."""
        return self.world_size > 1

    def setup(self, trainer: Any) -> None:
        """As every strategy's; the workers meet later, once a checkpoint is loaded and the batches are known."""
        super().setup(trainer)
        self._trainer = trainer
        trainer._accelerator_connector.use_distributed_sampler = False  # workers share the loader that there is

    def process_dataloader(self, dataloader: Any) -> Any:
        """The loader of training batches as the workers share it; others as they are.

        Raises:
            UsageError: there is a second one.
        """
        trainer = self._trainer
        if trainer is None or not trainer.training:
            return dataloader
        if self._worker is not None:
            raise UsageError(
                "Lightning asked for a second loader of training batches, and workers share one: give the Trainer one"
                " loader, and leave out reload_dataloaders_every_n_epochs."
            )
        if not self.optimizers:
            raise UsageError("The module's configure_optimizers returns no optimizer, so there is nothing to train.")
        self._enter()
        assert self._worker is not None
        if self._worker.num_workers == 1 or self._worker.algorithm.lockstep:
            self._dealt = _Dealt(self._worker, dataloader, self._stop)
            return self._dealt
        self._deferred = self._worker._defer_steps()  # Lightning fetches one batch ahead, to know which is the last
        return _Shared(self._worker, dataloader, self._stop)

    def _enter(self) -> None:
        optimizers: Any = self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers
        assert isinstance(self.model, nn.Module)
        self._worker = worker = attach(self.model, optimizers, self.algorithm).__enter__()
        self.global_rank, self.world_size = worker.worker_id, worker.num_workers
        rank_zero_only.rank = self.global_rank
        for config in self.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                config.scheduler = worker.follow(config.scheduler)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As every strategy's, of the step that begins with this batch."""
        if self._deferred:
            self._deferred.popleft()()
        return super().training_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """As every strategy's: the closure makes the gradient, then the algorithm and the optimizer step."""
        try:
            loss = super().optimizer_step(optimizer, closure, model, **kwargs)
            if self._dealt is not None:
                self._dealt.finish()
            return loss
        except RunStopped:
            self._stop()
            return None

    def _stop(self) -> None:
        self._trainer.should_stop = True

    # What workers tell each other

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, or the sum, over all workers at an epoch's end in lockstep; else the value as it is."""
        worker = self._worker
        if worker is None or worker.num_workers == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        if not (worker.algorithm.lockstep and self._is_between_batches):
            if reduce_op != "sum":  # by which Lightning looks whether anybody has batches
                self._warn_of_own_value()
            return tensor
        try:
            return worker.sum(tensor) if "sum" in str(reduce_op).lower() else worker.mean(tensor)
        except RunStopped:
            self._stop()
            return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers say so, or one of them, in lockstep; else this one's own decision."""
        worker = self._worker
        if worker is None or worker.num_workers == 1 or not worker.algorithm.lockstep:
            return decision
        try:
            votes, voters = worker.sum(torch.tensor([int(decision), 1])).tolist()
        except RunStopped:
            self._stop()
            return decision
        return votes == voters if all else votes > 0

    @property
    def _is_between_batches(self) -> bool:  # what Lightning itself goes by
        return getattr(self._trainer._logger_connector, "_first_loop_iter", False) is None

    def _warn_of_own_value(self) -> None:
        if not self._was_warned and self.is_global_zero:
            self._was_warned = True
            warnings.warn(
                "sync_dist=True: values within an epoch, and all under methods whose workers do not wait for each other, are"
                " this worker's own.",
                stacklevel=2,
            )

    # The end

    def on_train_end(self) -> None:
        """Waits for the workers that still train; then the module has the run's parameters."""
        super().on_train_end()
        self._leave(None)

    def on_exception(self, exception: BaseException) -> None:
        """Leaves the run as failed."""
        super().on_exception(exception)
        self._leave(exception)

    def teardown(self) -> None:
        """Leaves the run if it still takes part."""
        self._leave(None)
        super().teardown()

    def _leave(self, failure: BaseException | None) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.__exit__(type(failure) if failure is not None else None, failure, None)


class _Shared:
    """This worker's batches of every epoch, whose number nobody knows before.

    Args:
        worker: whose.
        loader: the module's.
        stop: ends the training; called where the run is being stopped.
    """

    def __init__(self, worker: Worker, loader: Any, stop: Callable[[], None]) -> None:
        self.loader = loader  # where Lightning looks for a sampler's `set_epoch`, and users for theirs
        self._batches = worker.batches(loader)
        self._stop = stop

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._batches
        except RunStopped:
            self._stop()


class _Dealt(_Shared):
    """The same, where every worker gets a share that is known."""

    _left = -1  # batches of this epoch that are still to come; -1: it is over
    _own: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._left, self._own = len(self), iter(self._batches)
        try:
            for batch in self._own:
                self._left -= 1
                yield batch
        except RunStopped:
            self._stop()

    def finish(self) -> None:
        """After the step of the last batch, takes part in the round in which only others have one.

        Lightning does not ask again after the last.
        """
        if not self._left:
            self._left = -1
            next(self._own, None)


StrategyRegistry.register(
    "paceline", PacelineStrategy, description="Workers of a launcher agree as the algorithm says", override=True
)
