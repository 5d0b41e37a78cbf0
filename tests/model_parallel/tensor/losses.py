"""A small model on a mesh, and losses of a user's own: whatever they are, they are those of one process with all rows."""

import torch
from torch import nn
from torch.nn import functional as F

from paceline import model_parallel as mp
from paceline.model_parallel.tensor import layers, state

ROWS, LENGTH, FEATURES, HIDDEN, OUTPUTS = 12, 3, 12, 24, 12  # which 2, 3 and 4 divide


class Net(nn.Module):
    """Every kind of parameter that a mesh has, with outputs in which a line is whole, and an activation in which it is cut."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.place = layers.PositionEmbedding(LENGTH, FEATURES, mesh, deviation=0.3)
        self.block = layers.Block(FEATURES, 12, mesh)
        self.token = layers.Embedding(OUTPUTS, FEATURES, mesh, deviation=0.3)
        self.wide = layers.Linear(FEATURES, HIDDEN, mesh)
        self.narrow = layers.Linear(HIDDEN, OUTPUTS, mesh, cut="inputs")

    def forward(self, x, tokens):
        self.before = self.block(x + self.place(LENGTH) + self.token(tokens))
        self.hidden = torch.tanh(self.wide(self.before))
        return self.narrow(self.hidden)


class Batch:
    """A worker's part of one."""

    def __init__(self, mesh, step=0):
        draw = torch.Generator().manual_seed(step)
        made = {"generator": draw, "dtype": torch.float64}
        x, target = (torch.randn(ROWS, LENGTH, FEATURES, **made) for _ in range(2))
        tokens, labels = (torch.randint(OUTPUTS, (ROWS, LENGTH), generator=draw) for _ in range(2))
        weights = torch.rand(ROWS, 1, 1, **made)
        self.x, self.target = (mesh.local_features(mesh.local_batch(one)) for one in (x, target))
        self.tokens, self.labels, self.weights = (mesh.local_batch(one) for one in (tokens, labels, weights))


def mean_square(model, batch):
    return F.mse_loss(model(batch.x, batch.tokens), batch.target)


def cross_entropy(model, batch):
    """PyTorch's, which needs a token's logits all together."""
    logits = mp.whole_features(model(batch.x, batch.tokens), OUTPUTS, model.mesh)
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), label_smoothing=0.1)


def own_cross_entropy(model, batch):
    """Over a vocabulary that is cut, from the embedding's table."""
    model(batch.x, batch.tokens)
    return mp.cross_entropy(model.token.logits(model.before), batch.labels, model.mesh)


def weighted_with_penalties(model, batch):
    """With a weight for each sample, a term for activations within a pair of layers, and one for all parameters."""
    error = model(batch.x, batch.tokens) - batch.target
    penalty = sum(one.square().sum() for one in model.parameters())
    return (batch.weights * error.abs()).mean() + 0.3 * model.hidden.pow(4).mean() + 0.01 * penalty


def all_together(model, batch):
    entropy = cross_entropy(model, batch)
    error = F.smooth_l1_loss(model.before, batch.target)
    return own_cross_entropy(model, batch) + 0.5 * entropy + 2 * error + 0.1 * model.wide.weight.abs().sum()


def sum_of_squares(model, batch):
    return F.mse_loss(model(batch.x, batch.tokens), batch.target, reduction="sum")


MEANS = [mean_square, cross_entropy, own_cross_entropy]  # of which the mean over the workers is the whole batch's
PENALISED = [weighted_with_penalties, all_together]


def trained(mesh, loss_of, *, steps=3, passes=2, scale=1.0):
    """Gradients of the last step and parameters after it, whole, by name; and the mean of the workers' last losses."""
    model = Net(mesh).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            loss = loss_of(model, Batch(mesh, step * passes + number)) / passes
            (loss * scale).backward()
        norm = state.clip_grad_norm(model, 1.0)
        optimizer.step()
    mean = mesh.mean(loss)
    after = state.full_state_dict(model)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.zeros_like(one) if one.grad is None else one.grad)
    return state.full_state_dict(model), after, norm, mean
