"""Modules whose parameters are sharded over a mesh; on a mesh of one worker they are PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.model_parallel.counters import dropout_part, normal_part
from paceline.model_parallel.placement import Placement, divided
from paceline.model_parallel.tensor.functions import (
    ColumnLinear,
    GridEmbedding,
    GridLinear,
    GridLogits,
    GridNorm,
    LineEmbedding,
    RowLinear,
    apply,
    as_used,
)
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.model_parallel.tensor.shapes import Grid, Line

_BATCH = ("row", "depth")  # along which workers have different samples


class Cut(nn.Module):
    """A module with parameters on a mesh, `mesh`."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    @property
    def placements(self) -> dict[str, Placement]:
        """The placements of its own parameters, by name; they change when the mesh is connected in another shape."""
        return {name: self.placement(name) for name, one in self._parameters.items() if one is not None}

    def placement(self, name: str) -> Placement:
        """The placement of one of them."""
        raise NotImplementedError

    def _add(self, name: str, shape: tuple[int, ...], *, deviation: float = 0.0, mean: float = 0.0) -> None:
        """Creates a parameter of that whole shape, normally distributed; its values do not depend on the mesh."""
        axes, stream, placement = self.mesh.axes, self.mesh.new_stream(), self.placement(name)
        local = placement.cut(torch.empty(shape, device="meta"), axes, f"{type(self).__name__}'s {name}").shape
        first = [0] * len(shape)
        for dimension, axis in placement.cuts:
            first[dimension] = axes[axis].index * local[dimension]
        values = torch.full(local, mean, dtype=torch.float64)
        if deviation:
            values += deviation * normal_part(stream, shape, first, local)
        self.register_parameter(name, nn.Parameter(values.to(torch.get_default_dtype())))

    def _used(self, name: str) -> Tensor:
        """Returns a parameter and watches its gradients from now on."""
        parameter = getattr(self, name)
        if torch.is_autocast_enabled(parameter.device.type):
            raise UsageError(
                "Layers on a mesh compute sums in the dtype of their parameters: use them outside torch.autocast."
            )
        placement, axes = self.placement(name), self.mesh.axes
        self.mesh.gradients.watch(parameter, placement)
        parts = 1 if self.mesh.is_line else math.prod(axes[axis].size for _, axis in placement.cuts)
        return parameter if parts == 1 else as_used(parameter, parts)


class Linear(Cut):
    """x W' + b, like `torch.nn.Linear`, over the mesh.

    On a grid, inputs and outputs are cut in the same way, so layers can follow each other in any order. On a line `cut`
    names the cut side: "outputs" takes whole activations and returns cut ones, "inputs" takes cut activations and returns
    whole ones. Two layers paired in this way need no collective between them.

    Args:
        inputs: features, whole.
        outputs: features, whole.
        mesh: the workers.
        cut: on a line; ignored on a grid.
        bias: whether there is one.
        deviation: of the weight's initial values; None: inputs ** -0.5.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        mesh: Mesh,
        *,
        cut: str = "outputs",
        bias: bool = True,
        deviation: float | None = None,
    ) -> None:
        super().__init__(mesh)
        if cut not in ("inputs", "outputs"):
            raise UsageError(f"A linear layer has no {cut!r} to cut: choose 'inputs' or 'outputs'.")
        self.cut = cut
        self._add("weight", (outputs, inputs), deviation=inputs**-0.5 if deviation is None else deviation)
        self.bias: nn.Parameter | None
        if bias:
            self._add("bias", (outputs,))
        else:
            self.bias = None

    def placement(self, name: str) -> Placement:
        mesh, is_weight = self.mesh, name == "weight"
        if not mesh.is_line:
            return (
                mesh.placement("column", "row", batch=("depth",))
                if is_weight
                else mesh.placement("column", batch=_BATCH)
            )
        if self.cut == "outputs":
            return mesh.placement("line")
        return mesh.placement(None, "line") if is_weight else mesh.placement()

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), this worker's parts of them."""
        weight = self._used("weight")
        bias = None if self.bias is None else self._used("bias")
        if self.mesh.hidden.size == 1:
            return F.linear(x, weight, bias)
        if not self.mesh.is_line:
            return apply(GridLinear, x, weight, bias, self.mesh)
        return apply(ColumnLinear if self.cut == "outputs" else RowLinear, x, weight, bias, self.mesh.hidden)


class LayerNorm(Cut):
    """Like `torch.nn.LayerNorm` over the last dimension. On a grid, two numbers per token are summed along the row.

    Args:
        features: whole.
        mesh: the workers.
        epsilon: added to the variance.
    """

    def __init__(self, features: int, mesh: Mesh, *, epsilon: float = 1e-5) -> None:
        super().__init__(mesh)
        self.epsilon = epsilon
        self._add("weight", (features,), mean=1.0)
        self._add("bias", (features,))

    def placement(self, name: str) -> Placement:
        return self.mesh.placement() if self.mesh.is_line else self.mesh.placement("column", batch=_BATCH)

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> (..., features)."""
        weight, bias = self._used("weight"), self._used("bias")
        if self.mesh.is_line or self.mesh.hidden.size == 1:
            return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)
        return apply(GridNorm, x, weight, bias, self.mesh.hidden, self.epsilon)


class Embedding(Cut):
    """Like `torch.nn.Embedding`, with the vocabulary cut over a line or a grid's rows, and features over columns.

    Args:
        vocabulary: rows; pad it to a multiple of the number of parts.
        features: whole.
        mesh: the workers.
        deviation: of the initial values.
    """

    def __init__(self, vocabulary: int, features: int, mesh: Mesh, *, deviation: float = 0.02) -> None:
        super().__init__(mesh)
        self._add("weight", (vocabulary, features), deviation=deviation)

    def placement(self, name: str) -> Placement:
        mesh = self.mesh
        return mesh.placement("line") if mesh.is_line else mesh.placement("row", "column", batch=("depth",))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) of this worker's part of the batch -> (batch, length, features)."""
        weight = self._used("weight")
        if self.mesh.hidden.size == 1:
            return F.embedding(tokens, weight)
        if self.mesh.is_line:
            return apply(LineEmbedding, tokens, weight, self.mesh.hidden)
        return apply(GridEmbedding, tokens, weight, self.mesh)

    def logits(self, x: Tensor) -> Tensor:
        """The output layer that shares this table: (..., features) -> (..., vocabulary), cut as `cross_entropy` needs it."""
        weight = self._used("weight")
        if self.mesh.hidden.size == 1:
            return F.linear(x, weight)
        if self.mesh.is_line:
            return apply(ColumnLinear, x, weight, None, self.mesh.hidden)
        return apply(GridLogits, x, weight, self.mesh)


class PositionEmbedding(Cut):
    """A learned vector for each position in a sequence; only its features are cut.

    Args:
        length: of the longest sequence.
        features: whole.
        mesh: the workers.
        deviation: of the initial values.
    """

    def __init__(self, length: int, features: int, mesh: Mesh, *, deviation: float = 0.02) -> None:
        super().__init__(mesh)
        self._add("weight", (length, features), deviation=deviation)

    def placement(self, name: str) -> Placement:
        return self.mesh.placement() if self.mesh.is_line else self.mesh.placement(None, "column", batch=_BATCH)

    def forward(self, length: int) -> Tensor:
        """The first `length` vectors, (length, features)."""
        return self._used("weight")[:length]


class Dropout(nn.Module):
    """Like `torch.nn.Dropout`, with a mask that depends only on element and call, so it is independent of the mesh.

    Args:
        probability: that an element is zero.
        mesh: the workers.
        axis: along which `cut_dim` is cut; None: this worker has all of it. "features": like activations between layers, over
            a grid's columns, and whole on a line; "heads": like heads, over columns or a line.
        cut_dim: a dimension of the input. Dimension 0 is the batch.
    """

    def __init__(self, probability: float, mesh: Mesh, *, axis: str | None = None, cut_dim: int = -1) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise UsageError(f"Dropout's probability is {probability}: give a number that is at least 0 and below 1.")
        self.probability, self.mesh, self.axis, self.cut_dim = probability, mesh, axis, cut_dim
        self._stream = mesh.new_stream()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Returns the same shape; the identity in evaluation mode."""
        if not self.training or not self.probability:
            return x
        mesh, whole, first = self.mesh, list(x.shape), [0] * x.dim()
        parts = mesh.shape.batch_parts
        whole[0], first[0] = x.shape[0] * parts * mesh.replicas, x.shape[0] * (mesh.replica * parts + mesh.batch_part)
        if (name := self.along(mesh)) is not None:
            axis, size = mesh.axes[name], x.shape[self.cut_dim]
            whole[self.cut_dim], first[self.cut_dim] = size * axis.size, size * axis.index
        seed = (*self._stream, int(self.calls))
        self.calls += 1
        return dropout_part(x, seed, whole, first, self.probability)

    def along(self, mesh: Mesh) -> str | None:
        """The mesh's axis along which `cut_dim` is cut."""
        if self.axis == "features":
            return None if mesh.is_line else mesh.hidden_axis
        return mesh.hidden_axis if self.axis == "heads" else self.axis


class MLP(nn.Module):
    """Two linear layers with GELU between them, and dropout after.

    Args:
        features: whole, of inputs and outputs.
        hidden: whole, between the layers.
        mesh: the workers.
        dropout: its probability.
    """

    def __init__(self, features: int, hidden: int, mesh: Mesh, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.wide = Linear(features, hidden, mesh)
        self.narrow = Linear(hidden, features, mesh, cut="inputs")
        self.dropout = Dropout(dropout, mesh, axis="features")

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> (..., features)."""
        return self.dropout(self.narrow(F.gelu(self.wide(x))))


class Attention(nn.Module):
    """Multi-head attention with heads cut over a line or a grid's columns: all operations between the two products are local.

    The rows of `qkv.weight` are by head: a head's queries, keys and values, then the next head's.

    Args:
        features: whole.
        heads: whole; the mesh must divide them.
        mesh: the workers.
        is_causal: whether a token attends only to positions up to its own.
        dropout: its probability, for the attention weights and for the output.
    """

    def __init__(self, features: int, heads: int, mesh: Mesh, *, is_causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        if features % heads:
            raise UsageError(f"{features} features are not a multiple of {heads} heads: choose one.")
        self.mesh, self.heads, self.is_causal = mesh, heads, is_causal
        self.local_heads(mesh.shape)
        self.qkv = Linear(features, 3 * features, mesh)
        self.out = Linear(features, features, mesh, cut="inputs")
        self.weights_dropout = Dropout(dropout, mesh, axis="heads", cut_dim=1)
        self.dropout = Dropout(dropout, mesh, axis="features")

    def local_heads(self, shape: Line | Grid) -> int:
        """The number of heads of a worker on such a mesh; raises UsageError if there are too few, or they do not divide."""
        if self.heads < shape.hidden_parts:
            raise UsageError(
                f"Attention with {self.heads} heads cannot be cut over {shape.hidden_parts} workers, each of which "
                f"needs a head: choose at least {shape.hidden_parts} heads, or another mesh."
            )
        return divided(self.heads, shape.hidden_parts, "a number of heads")

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, features) -> (batch, length, features)."""
        heads = self.heads // self.mesh.shape.hidden_parts
        query, key, value = self.qkv(x).unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4)
        if self.training and self.weights_dropout.probability:
            scores = query @ key.mT / math.sqrt(query.shape[-1])
            if self.is_causal:
                later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(later, -math.inf)
            attended = self.weights_dropout(scores.softmax(-1)) @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.dropout(self.out(attended.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """A transformer layer: attention, then an MLP of four times the features, each after a normalisation and with a residual.

    Args:
        features: whole.
        heads: whole.
        mesh: the workers.
        is_causal: as `Attention`.
        dropout: its probability.
    """

    def __init__(self, features: int, heads: int, mesh: Mesh, *, is_causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(features, mesh)
        self.attention = Attention(features, heads, mesh, is_causal=is_causal, dropout=dropout)
        self.mlp_norm = LayerNorm(features, mesh)
        self.mlp = MLP(features, 4 * features, mesh, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, features) -> (batch, length, features)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def cut_modules(model: nn.Module) -> Iterator[tuple[str, Cut]]:
    """The modules with parameters on a mesh, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Cut):
            yield name, module
