"""What loops do to their parameters outside the step, and a loop that does one of them at one place."""

import torch

from loops.coder import batches, loss_of, made, own_id, vector

BOUND = 0.1


def clamp(model):
    for p in model.parameters():
        p.data.clamp_(-BOUND, BOUND)


def clamp_without_gradients(model):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-BOUND, BOUND)


def replace(model):
    for p in model.parameters():
        p.data = p.data.clamp(-BOUND, BOUND)


def load(model):
    model.load_state_dict({name: value.clamp(-BOUND, BOUND) for name, value in model.state_dict().items()})


def swap(model):
    """For an evaluation with other weights, as with an average of them."""
    own = {name: value.clone() for name, value in model.state_dict().items()}
    load(model)
    model.load_state_dict(own)


def nothing(model):
    pass


CHANGES = [clamp, clamp_without_gradients, replace, load]
PLACES = ["before", "top", "backward", "step", "epoch"]


def trained(attach, change, place, *, uses_batches=True, number=6, epochs=2):
    """One worker that changes its parameters at one place of its loop; returns its model's."""
    model, optimizer = made()

    def at(here):
        if here == place:
            change(model)

    with attach(model, optimizer) as worker:
        at("before")
        for epoch in range(epochs):
            own = batches(number, worker=0 if uses_batches else 10 * epoch + own_id())
            for x in worker.batches(own) if uses_batches else own:
                at("top")
                optimizer.zero_grad()
                loss_of(model, x).backward()
                at("backward")
                optimizer.step()
                at("step")
            at("epoch")
    return vector(model)
