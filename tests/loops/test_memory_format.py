"""Parameters in channels_last lie otherwise in the flat vector than contiguous ones."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from loops.test_initial_state import STARTS, own_id
from paceline.optim.flat import FlatBinding, model_words

DATA = TensorDataset(torch.arange(48.0).reshape(8, 2, 3, 1))
CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last


def net(memory_format):
    """With equal weights in all workers: threads share PyTorch's generator, and a seed set in one moves the others'."""
    model = nn.Conv2d(2, 3, (2, 1))
    for one in model.parameters():
        nn.init.trunc_normal_(one, generator=torch.Generator().manual_seed(0))
    return model.to(memory_format=memory_format)


def loop(formats, epochs=1, begun=None):
    model = net(formats[own_id()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pl.attach(model, optimizer) as worker:
        if begun is not None:
            begun.append(model.weight.detach().clone())
        for _ in range(epochs):
            for (x,) in worker.batches(DataLoader(DATA, batch_size=2)):
                model(x).sum().backward()
                optimizer.step()


def test_the_order_names_what_is_not_contiguous():
    """Without dimensions of size 1."""
    assert [FlatBinding(net(one).parameters()).memory_order for one in (CONTIGUOUS, LAST)] == ["", "0:0,2,1"]
    assert model_words(net(CONTIGUOUS)) != model_words(net(LAST))


@STARTS
def test_workers_with_different_formats_are_refused(start):
    with pytest.raises(pl.UsageError, match="all workers must build the same model, in one memory format") as raised:
        start(partial(loop, [CONTIGUOUS, LAST, LAST]), "hogwild")
    raised.value.__traceback__ = None


@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild"])
def test_a_run_is_resumed_in_its_format_only(algorithm, tmp_path):
    folder, options = tmp_path / "run", {"workers": 2, "algorithm": algorithm, "backend": "threads"}
    pl.launch(partial(loop, [LAST, LAST]), out=folder, **options)
    begun = []
    pl.launch(partial(loop, [LAST, LAST], 2, begun), resume=folder, **options)
    assert all(torch.equal(one, net(CONTIGUOUS).weight) for one in begun)
    with pytest.raises(pl.UsageError, match="is of a model in another memory format, such as channels_last"):
        pl.launch(partial(loop, [CONTIGUOUS, CONTIGUOUS], 2), resume=folder, **options)
