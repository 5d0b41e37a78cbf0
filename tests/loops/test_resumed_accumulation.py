"""A lockstep run is resumed at the beginning of an epoch before whose end the loop has accumulated gradients."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from leftovers import wait_until
from paceline.records import checkpoint_contents, checkpoint_files
from paceline.run import checkpointer

SETTINGS = {"workers": 2, "seed": 5, "checkpoint_every_s": 0, "backend": "threads"}
EPOCHS = 4  # of 11 batches, in six rounds


class Loop:
    """Steps after every fourth batch, counted over all epochs or in each anew; fails once, after the first checkpoint."""

    def __init__(self, folder, *, counts_anew, fails):
        self.folder, self.counts_anew, self.fails = folder / "checkpoint", counts_anew, fails

    def __call__(self):
        model = nn.Linear(4, 1, bias=False).double()
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rows = torch.linspace(-3, 3, 22 * 4, dtype=torch.float64).view(22, 4).sin()
        loader, number = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True).sin()), batch_size=2, shuffle=True), 0
        with pl.attach(model, optimizer) as worker:
            for epoch in range(EPOCHS):
                number = 0 if self.counts_anew else number
                for x, y in worker.batches(loader):
                    if self.fails and epoch == 1:
                        wait_until(lambda: checkpoint_files.newest_or_none(self.folder), "the checkpoint")
                        raise KeyError("label 17")
                    number += 1
                    nn.functional.mse_loss(model(x), y).backward()
                    if number % 4 == 0:
                        optimizer.step()
                        optimizer.zero_grad()


def last(folder):
    return checkpoint_contents.load_parameters(checkpoint_files.newest(folder / "checkpoint"))


@pytest.mark.parametrize("counts_anew", [False, True])
@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "local-sgd(period=2)", "all-reduce(shares=auto)"])
def test_its_batches_are_dealt_again(algorithm, counts_anew, tmp_path, monkeypatch):
    recorded = checkpointer.Checkpointer._recorded

    def is_there(self, supervisor, number, needed, running, lost):
        return recorded(self, supervisor, number, needed, running, lost) or number in self._written

    monkeypatch.setattr(checkpointer.Checkpointer, "_recorded", is_there)
    whole, run = tmp_path / "whole", tmp_path / "run"
    ended = pl.launch(Loop(whole, counts_anew=counts_anew, fails=False), algorithm=algorithm, out=whole, **SETTINGS)
    with pytest.raises(pl.PacelineError, match="label 17"):
        pl.launch(Loop(run, counts_anew=counts_anew, fails=True), algorithm=algorithm, out=run, **SETTINGS)
    assert last(run).version == 1
    resumed = pl.launch(Loop(run, counts_anew=counts_anew, fails=False), resume=run, out=run, **SETTINGS)
    assert resumed.result["batches_missed"] == 0
    if "auto" in algorithm:
        assert resumed.result["samples"] == ended.result["samples"]
    else:
        assert torch.equal(last(run).x, last(whole).x)
