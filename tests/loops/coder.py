"""A model that loops use by its parts, and data for it that differ between workers."""

import torch
from torch import nn

import paceline as pl
from paceline.membership.environment import current_environment


class Coder(nn.Module):
    """An autoencoder of two linear layers."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 3)
        self.decoder = nn.Linear(3, 6)

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoder(z)

    def forward(self, x):
        return self.decode(self.encode(x))


def made(lr=0.1, momentum=0.0):
    torch.manual_seed(0)
    model = Coder()
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def own_id():
    environment = current_environment()
    return environment.worker_id if environment is not None else 0


def batches(number, size=4, worker=None):
    """So many batches of this worker's own."""
    generator = torch.Generator().manual_seed(100 + (own_id() if worker is None else worker))
    return [torch.randn(size, 6, generator=generator) for _ in range(number)]


def loss_of(model, x):
    return (model.decode(model.encode(x)) - x).square().mean()


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def initial():
    return vector(made()[0])


HELD_OUT = torch.randn(64, 6, generator=torch.Generator().manual_seed(7))


def held_out_loss(x):
    """Of the parameters (P,) on data that no worker trains on."""
    model, _ = made()
    nn.utils.vector_to_parameters(x, model.parameters())
    with torch.no_grad():
        return loss_of(model, HELD_OUT).item()


# The encoder and the decoder with optimizers of their own


def halves(model, lr=0.1):
    """One optimizer for the encoder, and another kind for the decoder."""
    return [
        torch.optim.Adam(model.encoder.parameters(), lr=0.02),
        torch.optim.SGD(model.decoder.parameters(), lr=lr, momentum=0.5),
    ]


def train_together(model, optimizers, own):
    for x in own:
        for one in optimizers:
            one.zero_grad()
        loss_of(model, x).backward()
        for one in optimizers:
            one.step()


def plain_halves(num_workers, steps):
    """One worker whose batches are those of all workers of a round."""
    model, _ = made()
    all_of_them = [batches(steps, worker=worker) for worker in range(num_workers)]
    train_together(model, halves(model), [torch.cat(of_round) for of_round in zip(*all_of_them, strict=True)])
    return vector(model)


def together(steps=6, lr=0.1):
    model, _ = made()
    optimizers = halves(model, lr)
    with pl.attach(model, optimizers):
        train_together(model, optimizers, batches(steps))
    return vector(model)
