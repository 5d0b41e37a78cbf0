"""Lightning's private attributes that the strategy uses, each with its reason; Lightning 2.4 and later have them."""

from __future__ import annotations

from typing import Any


def keep_sampler(trainer: Any) -> None:
    """Lightning would give each worker's loader a distributed sampler, but workers share the existing loader."""
    trainer._accelerator_connector.use_distributed_sampler = False


def set_sigterm_broadcast(trainer: Any, *, is_on: bool) -> None:
    """Lightning (2.5 and later) broadcasts before every batch, over the default group, whether worker 0 got a SIGTERM.

    Under torchrun that is the run's group, so workers of asynchronous methods would wait for each other.
    """
    loop = trainer.fit_loop.epoch_loop
    if is_on:
        vars(loop).pop("_broadcast_sigterm_tensor", None)
    else:
        loop._broadcast_sigterm_tensor = lambda: None


def combined_loader(trainer: Any) -> Any:
    """The loader of the running `fit`, whose training loaders must be replaced afterwards; None: not made yet."""
    return trainer.fit_loop._combined_loader


def forget_loader(trainer: Any) -> None:
    """Has `fit` make its loader again: `estimated_stepping_batches` has asked for it before the workers were connected."""
    trainer.fit_loop._data_fetcher.teardown()
    trainer.fit_loop._combined_loader = None


def set_weight_of_logs(trainer: Any, num_samples: int) -> None:
    """The number of samples that a step's logged values stand for; Lightning takes it from the batch itself."""
    trainer._results.batch_size = num_samples
