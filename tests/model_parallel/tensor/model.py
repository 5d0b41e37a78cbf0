"""A small GPT on a mesh, the same in plain PyTorch, and three steps of training, whole or in parts."""

import torch
from torch import nn
from torch.nn import functional as F

from paceline import model_parallel as mp
from paceline.model_parallel.tensor import layers, state

VOCABULARY, LENGTH, HIDDEN, HEADS, BATCH, LAYERS = 24, 5, 24, 12, 12, 2  # which 2, 3 and 4 divide
# The biases of keys change no softmax: their gradients are rounding errors, which AdamW divides by their own size and epsilon.
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-6),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class GPT(nn.Module):
    def __init__(self, mesh, dropout=0.0, is_tied=True, num_blocks=LAYERS):
        super().__init__()
        self.mesh = mesh
        self.token = layers.Embedding(VOCABULARY, HIDDEN, mesh, deviation=0.3)
        self.place = layers.PositionEmbedding(LENGTH, HIDDEN, mesh, deviation=0.3)
        self.blocks = nn.Sequential(*(layers.Block(HIDDEN, HEADS, mesh, dropout=dropout) for _ in range(num_blocks)))
        self.norm = layers.LayerNorm(HIDDEN, mesh)
        self.head = None if is_tied else layers.Linear(HIDDEN, VOCABULARY, mesh)

    def forward(self, tokens, following, more):
        x = self.norm(self.blocks(self.token(tokens) + self.place(tokens.shape[1]) + more))
        return mp.cross_entropy(self.token.logits(x) if self.head is None else self.head(x), following, self.mesh)


class Plain(nn.Module):
    """The same with PyTorch's own functions, from a state of GPT's."""

    def __init__(self, state):
        super().__init__()
        self.names = {name: name.replace(".", "_") for name, tensor in state.items() if tensor.is_floating_point()}
        for name, own in self.names.items():
            self.register_parameter(own, nn.Parameter(state[name].clone()))

    def of(self, name):
        return getattr(self, self.names[name])

    def linear(self, name, x):
        return F.linear(x, self.of(f"{name}.weight"), self.of(f"{name}.bias"))

    def norm(self, name, x):
        return F.layer_norm(x, (HIDDEN,), self.of(f"{name}.weight"), self.of(f"{name}.bias"))

    def forward(self, tokens, following, more):
        x = self.of("token.weight")[tokens] + self.of("place.weight") + more
        for number in range(LAYERS):
            name = f"blocks.{number}"
            by_head = self.linear(f"{name}.attention.qkv", self.norm(f"{name}.attention_norm", x))
            by_head = by_head.view(*x.shape[:2], HEADS, 3, HIDDEN // HEADS)
            query, key, value = (by_head[:, :, :, one].transpose(1, 2) for one in range(3))
            scores = (query @ key.mT) / (HIDDEN // HEADS) ** 0.5
            scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
            attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
            x = x + self.linear(f"{name}.attention.out", attended)
            wide = F.gelu(self.linear(f"{name}.mlp.wide", self.norm(f"{name}.mlp_norm", x)))
            x = x + self.linear(f"{name}.mlp.narrow", wide)
        x = self.norm("norm", x)
        logits = self.linear("head", x) if "head.weight" in self.names else x @ self.of("token.weight").T
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def data(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    more = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator, dtype=torch.float64)
    return tokens[:, :-1], tokens[:, 1:], more


def built(mesh, **options):
    return GPT(mesh, **options).double()


def steps(model, optimizer, mesh, first=0, last=3, max_norm=None):
    """(loss, gradient of the whole float input) of each step."""
    found = []
    for step in range(first, last):
        tokens, following, more = (mesh.local_batch(one) for one in data(step))
        more = mesh.local_features(more).clone().requires_grad_()
        optimizer.zero_grad()
        loss = model(tokens, following, more)
        loss.backward()
        norm = None if max_norm is None else state.clip_grad_norm(model, max_norm)
        optimizer.step()
        found.append((loss.detach(), whole_gradient(more.grad, mesh), norm))
    return found


def whole(x, mesh):
    """(batch, length, features) of all workers."""
    if mesh.is_line:
        return x
    x = torch.cat(mesh.axes["column"].all_gather(x).unbind(), -1)
    for axis in ("row", "depth"):
        x = mesh.axes[axis].all_gather(x).flatten(0, 1)
    return x


def whole_gradient(x, mesh):
    """That of an input, which is of the sum of the losses of a grid's workers."""
    return whole(x, mesh) / (1 if mesh.is_line else mesh.shape.workers)


def trained(mesh, optimizer="adamw", max_norm=None, **options):
    """Losses and input gradients, then every parameter and every piece of the optimizer's state, whole."""
    model = built(mesh, **options)
    one = OPTIMIZERS[optimizer](model.parameters())
    found = steps(model, one, mesh, max_norm=max_norm)
    return found, state.full_state_dict(model), state.full_optimizer_state(model, one)


def assert_equal(mine, reference, tolerance=1e-12):
    """Losses, input gradients, norms, and states."""
    for (loss, gradient, norm), (other_loss, other_gradient, other_norm) in zip(mine[0], reference[0], strict=True):
        torch.testing.assert_close(loss, other_loss, rtol=0, atol=tolerance)
        torch.testing.assert_close(gradient, other_gradient, rtol=0, atol=tolerance)
        assert norm is None or abs(norm - other_norm) < tolerance
    assert mine[1].keys() == reference[1].keys()
    for name, tensor in mine[1].items():
        torch.testing.assert_close(
            tensor, reference[1][name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
