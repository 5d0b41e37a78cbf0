"""Parts of the strategy for Lightning: values of all workers, a schedule of the run's steps, a shared loader."""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.errors import RunStopped, UsageError
from paceline.loop.schedules import FollowedScheduler
from paceline.worker.gathering import Call, Gatherer, total_of
from paceline.worker.worker import Worker

_REMEDY = "all workers must call it, so not under `if trainer.is_global_zero`."


def bring_together(gatherer: Gatherer, operation: str, worker_id: int, value: Any) -> dict[int, Any]:
    """The values of all workers for the same operation, by worker.

    Raises:
        UsageError: they call different operations, or a value is not made of tensors, numbers, strings and containers.
        RunStopped: the run is being stopped.
    """
    packed = io.BytesIO()
    torch.save((operation, worker_id, value), packed)
    brought = gatherer.gather(torch.frombuffer(packed.getbuffer(), dtype=torch.uint8), Call(operation, _REMEDY))
    try:
        own = [torch.load(io.BytesIO(one.numpy().tobytes()), "cpu", weights_only=True) for one in brought]
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"strategy.{operation} takes tensors, numbers, strings, and lists, tuples and dicts of them, not "
            f"{type(value).__name__}: pass one of these."
        ) from error
    operations = sorted({name for name, _, _ in own})
    if len(operations) > 1:
        raise UsageError(f"Some workers call strategy.{' and others strategy.'.join(operations)}: {_REMEDY}")
    return {worker: value for _, worker, value in own}


def reduced(values: list[torch.Tensor], operation: Any) -> torch.Tensor:
    """The sum, mean, least or largest of the workers' values, by Lightning's name or PyTorch's for the operation."""
    match str(operation).lower().rpartition(".")[2]:
        case "sum":
            return total_of(values)
        case "mean" | "avg":
            return total_of(values) / len(values)
        case "max":
            return torch.stack(values).amax(0)
        case "min":
            return torch.stack(values).amin(0)
        case name:
            raise UsageError(
                f"Values of several workers can be reduced by sum, mean, max or min, not {name}: log with one of these."
            )


class RunSchedule(FollowedScheduler):
    """A scheduler that follows the run's steps whenever Lightning steps it, as long as Lightning does."""

    def __init__(self, config: Any, steps: Callable[[], float]) -> None:
        self._config, self._frequency = config, config.frequency
        super().__init__(config.scheduler, lambda: steps() / self._frequency)
        config.scheduler, config.frequency = self, 1

    def step(self, *ignored: Any) -> None:
        self.advance()

    def end(self) -> None:
        """Gives Lightning its own scheduler back."""
        self._config.scheduler, self._config.frequency = self.scheduler, self._frequency


class SharedLoader:
    """This worker's batches of every epoch; other attributes, such as `dataset`, are the loader's."""

    def __init__(self, loader: Any, worker: Worker, deferred: deque[Any], stop: Callable[[], None]) -> None:
        self.loader = loader
        self._worker = worker
        self._batches = worker.batches(loader)
        self._deferred = deferred  # functions that begin the steps of batches that have been fetched
        self._stop = stop  # ends the training; called when the run is being stopped

    def __len__(self) -> int:
        if self._worker.num_workers > 1 and not self._worker.algorithm.lockstep:
            raise TypeError("how many batches a worker gets depends on how fast it is")
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._deferred.clear()  # of an epoch that was left early
        try:
            yield from self._batches
        except RunStopped:
            self._stop()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)
