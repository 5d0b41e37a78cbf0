"""Unwrap models, optimizers and loaders from Accelerate's `prepare` and Fabric's `setup`.

Neither package is needed: their classes are known by their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError

_OPTIMIZERS = {"AcceleratedOptimizer": "optimizer", "_FabricOptimizer": "optimizer"}
_MODELS = {"_FabricModule": "module"}
_LOADERS = {
    "DataLoaderShard": "base_dataloader",
    "DataLoaderDispatcher": "base_dataloader",
    "SkipDataLoader": "base_dataloader",
    "_FabricDataLoader": "_dataloader",
}


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The inner optimizer, which makes the steps and whose hooks run."""
    return _inside(optimizer, _OPTIMIZERS)


def unwrapped_model(model: Any) -> Any:
    """The user's own module; raises an error if a wrapper averages gradients itself."""
    model = _inside(model, _MODELS)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "DistributedDataParallel would average the workers' gradients a second time: leave it out, and train the "
            "model itself under all-reduce, which does the same. Accelerate and Fabric add it under torchrun: "
            "prepare, or set up, only the optimizer and the loader."
        )
    return model


def unwrapped_loader(loader: Any) -> Any:
    """The plain loader, or the loader itself."""
    return _inside(loader, _LOADERS)


def device_of(loader: Any) -> torch.device | None:
    """The device to which a wrapped loader moves its batches; None: it does not."""
    if _place(loader, _LOADERS) is None:
        return None
    device = getattr(loader, "_device", None) or getattr(loader, "device", None)
    return torch.device(device) if device is not None else None


def telling_end(loader: Any, batches: Iterator[Any], length: int) -> Iterator[Any]:
    """Tells an Accelerate loader which of `length` batches is the last, at which gradient accumulation makes its step."""
    loader.begin()
    # `gather_for_metrics` would cut the last batch to this remainder, which belongs to the whole epoch's last batch.
    loader.remainder = -1
    try:
        for number, batch in enumerate(batches, start=1):
            loader.end_of_dataloader = number == length
            yield batch
    finally:
        loader.end()


def _inside(one: Any, places: dict[str, str]) -> Any:
    while (place := _place(one, places)) is not None:
        if not hasattr(one, place):  # an unrelated class of that name
            return one
        one = getattr(one, place)
    return one


def _place(one: Any, places: dict[str, str]) -> str | None:
    return next((places[kind.__name__] for kind in type(one).__mro__ if kind.__name__ in places), None)
