"""Models of drawn operations: contexts, in-place changes, shared and frozen layers, branches, several outputs."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn

LAYERS, WIDTH = 4, 8  # the last layer is frozen
ONE = (
    "linear",
    "tanh",
    "norm",
    "swap",
    "reverse",
    "teacher",
    "detach",
    "autocast",
    "factor",
    "in place",
    "in place late",
)
TWO = ("add", "multiply", "attend", "add in place")


@dataclass(frozen=True)
class Operation:
    """Reads earlier values by their index, counted from the latest, and may use a layer."""

    kind: str
    reads: tuple[int, ...]
    layer: int


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -0.5 * gradient


class Drawn(nn.Module):
    """Takes a dictionary of inputs, and returns one value per head."""

    def __init__(self, operations, heads):
        super().__init__()
        self.operations, self.read_by_heads, self.beta = operations, heads, 1.0
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(LAYERS))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in heads)
        self.layers[-1].requires_grad_(False)

    def forward(self, batch):
        values = [batch["x"], self.layers[0](batch["z"])]
        for one in self.operations:
            values.append(self.result(one, *(values[-1 - at % len(values)] for at in one.reads)))
        return tuple(
            head(values[-1 - at % len(values)]) for head, at in zip(self.heads, self.read_by_heads, strict=True)
        )

    def result(self, one, u, v=None):
        layer = self.layers[one.layer]
        match one.kind:
            case "linear":
                return layer(u)
            case "tanh":
                return torch.tanh(u)
            case "norm":
                return self.norms[one.layer](u)
            case "swap":
                left, right = u.chunk(2, 1)
                return torch.cat([right, left], 1)
            case "reverse":
                return Reversed.apply(u)
            case "teacher":
                with torch.no_grad():
                    return layer(u)
            case "detach":
                return u + layer(u).detach()
            case "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    return layer(u).to(u.dtype)
            case "factor":
                return self.beta * u
            case "in place":
                return (u * 0.5).tanh_()
            case "in place late":
                return torch.relu_(layer(u))
            case "add":
                return u + v
            case "multiply":
                return torch.tanh(u) * v
            case "attend":
                return torch.softmax(u @ v.t(), 1) @ v
            case "add in place":
                w = layer(u)
                w += v
                return w


def operations():
    number = st.integers(0, 3)
    one = st.builds(Operation, st.sampled_from(ONE), st.tuples(number), st.integers(0, LAYERS - 1))
    two = st.builds(Operation, st.sampled_from(TWO), st.tuples(number, number), st.integers(0, LAYERS - 1))
    return st.lists(one | two, min_size=2, max_size=8).map(tuple)
