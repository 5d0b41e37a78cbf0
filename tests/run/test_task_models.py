"""A task whose model or loss fails is refused in one sentence before any worker starts."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

SAMPLES = TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
FAULTS = {
    "none": ({"model": lambda: None}, "model must return a torch.nn.Module, not None"),
    "a class": ({"model": lambda: nn.Linear}, "model must return a torch.nn.Module, not <class"),
    "raises": ({"model": lambda: 1 / 0}, "making its model failed at line .*: ZeroDivisionError"),
    "exits": ({"model": lambda: exit(3)}, "making its model failed at line .*: SystemExit: 3"),
    "half precision": ({"model": lambda: nn.Linear(4, 2).half()}, "computing its loss and accuracy failed .* dtype"),
    "other shapes": ({"model": lambda: nn.Linear(5, 2)}, "computing its loss and accuracy failed .* shapes"),
    "loss raises": ({"loss": lambda output, target: 1 / 0}, "computing its loss and accuracy failed .*ZeroDivision"),
}


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("run", [pl.train, pl.simulate_task], ids=["train", "simulate"])
def test_a_task_that_cannot_be_trained_is_refused_before_training(monkeypatch, tmp_path, run, what):
    given, says = FAULTS[what]
    task = pl.Task(**{"name": "mine", "model": lambda: nn.Linear(4, 2), "datasets": lambda _: (SAMPLES,) * 2} | given)
    for module in ("train", "simulate_task"):
        monkeypatch.setattr(f"paceline.run.{module}.load_task", lambda _: task)
    with pytest.raises(pl.UsageError, match=f"Task 'mine': {says}"):
        run(pl.TrainConfig(task="mine", workers=2, steps=2, backend="threads"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
