"""A loop of Lightning's Fabric, the real package, with `attach` in it: alone it is the plain loop, bit for bit."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline as pl

lightning = pytest.importorskip("lightning", reason="needs the extra: pip install 'paceline[lightning]'")
from integrations.lightning_programs import digits, vector  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


def made(precision, batch_size):
    """What Fabric makes of a model, its optimizer and its loader."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    loader = DataLoader(digits()[0], batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(5))
    return fabric, *fabric.setup(model, optimizer), fabric.setup_dataloaders(loader)


def epoch(fabric, model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()


def train(precision="32-true", batch_size=32, epochs=2):
    """The loop with the two lines; what the model has come to."""
    fabric, model, optimizer, loader = made(precision, batch_size)
    with pl.attach(model, optimizer) as worker:
        for _ in range(epochs):
            epoch(fabric, model, optimizer, worker.batches(loader))
    return vector(model)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_one_worker_is_the_plain_loop_bit_for_bit(precision):
    fabric, model, optimizer, loader = made(precision, 32)
    for _ in range(2):
        epoch(fabric, model, optimizer, loader)
    assert np.array_equal(train(precision), vector(model))
