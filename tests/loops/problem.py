"""What the loops of the table train: a small classifier, on the labels of a fixed teacher."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

INPUTS, CLASSES, SAMPLES, BATCH, EPOCHS = 6, 3, 96, 8, 4


def labelled(number, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, INPUTS, generator=generator)
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(5))
    return x, (x @ teacher).argmax(1)


TRAIN, HELD_OUT = labelled(SAMPLES, 1), labelled(128, 2)


class Net(nn.Module):
    """Two layers; loops may call it by its parts."""

    def __init__(self, hidden=12):
        super().__init__()
        self.body = nn.Linear(INPUTS, hidden)
        self.head = nn.Linear(hidden, CLASSES)

    def features(self, x):
        return torch.tanh(self.body(x))

    def forward(self, x):
        return self.head(self.features(x))


first_losses = {}  # "last": what the model that was made last began with


def made(lr=0.2, model=None, **settings):
    torch.manual_seed(0)
    model = Net() if model is None else model()
    first_losses["last"] = held_out_loss(model)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **settings)


def loader(**settings):
    settings = {"batch_size": BATCH, "shuffle": True} | settings
    return DataLoader(TensorDataset(*TRAIN), **settings)


def held_out_loss(model):
    """In evaluation mode; the model's mode stays as it is."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(HELD_OUT[0]), HELD_OUT[1]).item()
    model.train(was_training)
    return loss
