"""The `Task` class, and the helpers that every backend needs to train and evaluate a task."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from paceline.errors import UsageError, shown
from paceline.specs.user_file import run_user_code

DATA_VARIABLE = "PACELINE_DATA"
Datasets = tuple[Dataset[Any], Dataset[Any]]

_kept: dict[Any, Datasets] | None = None  # what `keep_data` keeps


def argmax_accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Fraction of samples whose largest output (samples, classes) is at the target class (samples,)."""
    return (output.argmax(dim=-1) == target).float().mean()


@dataclass(frozen=True, kw_only=True)
class Task:
    """Model, loss, data and evaluation; what a run needs besides the algorithm.

    A file with a function that returns a Task is a task: `paceline train --task path/to/file.py:function`.

    Args:
        name: for tables and run folders.
        model: makes the model; called after seeding, so that equal seeds give equal parameters.
        datasets: makes the map-style training and test data sets from the data folder, which may be None. A
            `TensorDataset(inputs, targets)` is read by index, without collating samples one by one.
        loss: mean loss of outputs and targets, a scalar.
        accuracy: fraction correct of outputs and targets, a scalar; None if the task has no accuracy.
        batch_size: default samples per batch and worker.
        learning_rate: default for plain SGD.
        epochs: default passes over the training data, all workers together.
    """

    name: str
    model: Callable[[], nn.Module]
    datasets: Callable[[Path | None], Datasets]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    accuracy: Callable[[Tensor, Tensor], Tensor] | None = argmax_accuracy
    batch_size: int = 64
    learning_rate: float = 0.1
    epochs: float = 1.0

    def load(self, data: Path | None = None) -> Datasets:
        """Training and test data sets; `data` defaults to the folder that PACELINE_DATA names.

        Raises:
            UsageError: the samples are missing, or files are missing or corrupt; the message says which, and where to get
                them.
        """
        if data is None and os.environ.get(DATA_VARIABLE):
            data = Path(os.environ[DATA_VARIABLE])
        if _kept is None:
            return self._load(data)
        key = (self.datasets, data)
        if key not in _kept:
            _kept.clear()  # one task's at a time
            _kept[key] = self._load(data)
        return _kept[key]

    def new_model(self, seed: int | None = None) -> nn.Module:
        """Makes a model right after seeding torch's generator, so that its random state matches plain training.

        Raises:
            UsageError: `model` fails, or does not return a module.
        """
        if seed is not None:
            torch.manual_seed(seed)
        made = run_user_code(None, f"Task '{self.name}': making its model", self.model)
        if not isinstance(made, nn.Module):
            raise UsageError(f"Task '{self.name}': model must return a torch.nn.Module, not {shown(made)}.")
        return made

    def _load(self, data: Path | None) -> Datasets:
        found = run_user_code(None, f"Task '{self.name}': loading its data", lambda: self.datasets(data))
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise UsageError(
                f"Task '{self.name}': datasets must return the training and the test set, not {shown(found)}."
            )
        for what, one in zip(("training", "test"), found, strict=True):
            if not hasattr(one, "__len__"):
                raise UsageError(f"Task '{self.name}': its {what} set has no length; use a map-style data set.")
            if not len(one):
                raise UsageError(f"Task '{self.name}': its {what} set is empty; give it at least one sample.")
        return found[0], found[1]

    def evaluate(self, model: nn.Module, dataset: Dataset[Any], *, chunk_size: int = 1000) -> dict[str, float | None]:
        """`evaluate` with this task's loss and accuracy."""
        return evaluate(model, dataset, loss=self.loss, accuracy=self.accuracy, chunk_size=chunk_size)


@contextlib.contextmanager
def keep_data() -> Iterator[None]:
    """Makes runs of one task inside the `with` load its data only once: for many short runs in a row."""
    global _kept
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


def evaluate(
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    accuracy: Callable[[Tensor, Tensor], Tensor] | None = argmax_accuracy,
    chunk_size: int = 1000,
) -> dict[str, float | None]:
    """Mean loss and accuracy over a data set, in evaluation mode; every module's mode is restored afterwards.

    Returns:
        {"loss": ..., "accuracy": ...}; accuracy is None if the task has none.
    """
    num_samples = len(dataset)  # type: ignore[arg-type]
    if num_samples == 0:
        raise UsageError("The evaluation data set is empty; give the task at least one test sample.")
    total_loss, total_correct = 0.0, 0.0
    with evaluation_mode(model):
        for chunk in torch.arange(num_samples).split(chunk_size):
            inputs, targets = fetch(dataset, chunk)
            output = model(inputs)
            total_loss += float(loss(output, targets)) * len(chunk)
            total_correct += float(accuracy(output, targets)) * len(chunk) if accuracy else 0.0
    return {"loss": total_loss / num_samples, "accuracy": total_correct / num_samples if accuracy else None}


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within it the model is in evaluation mode, and records no gradients; afterwards each module is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def fetch(dataset: Dataset[Any], indices: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the samples at `indices`: one indexing operation for (part of) a TensorDataset, else collated."""
    if type(dataset) is Subset:
        return fetch(dataset.dataset, torch.as_tensor(dataset.indices)[indices])
    if type(dataset) is TensorDataset:  # a subclass may change what a sample is
        inputs, targets = dataset.tensors
        return inputs[indices], targets[indices]
    inputs, targets = default_collate([dataset[index] for index in indices.tolist()])
    return inputs, targets


def targets_of(dataset: Dataset[Any]) -> Tensor:
    """Every sample's target (samples, ...), for the skewed partition."""
    if type(dataset) is TensorDataset:  # a subclass may change what a sample is
        return dataset.tensors[1]
    return torch.as_tensor([dataset[index][1] for index in range(len(dataset))])  # type: ignore[arg-type]
