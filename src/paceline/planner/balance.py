"""The balance equations: which layers to train with data, model or hybrid parallelism, and on how many nodes.

Data parallelism sends a layer's weights, overlapped with computation. Model parallelism sends activations, which pays if
weights outnumber them. Hybrid: G groups of N / G nodes, model parallel within a group, data parallel between groups.

Counts convolutions and fully connected layers, and the bytes of one node and step. As in the paper, messages have no latency
and G divides N; unlike in its rule of thumb, activations count in both directions.

Reference: Das, Avancha, Mudigere et al., "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent", 2016,
    arXiv:1602.06709, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError

ELEMENT_BYTES = 4  # float32
_OPERATIONS = 6  # forward, backward and weight gradient, each a multiplication and an addition


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A convolution, or a fully connected layer, which is one with images of 1 x 1."""

    name: str
    ifm: int  # input feature maps, per group of a grouped convolution
    ofm: int  # output feature maps
    kernel: int = 1  # width times height of a kernel
    in_size: int = 1  # width times height of an input map
    out_size: int = 1  # width times height of an output map

    @property
    def weights(self) -> int:
        """Elements, without biases."""
        return self.ifm * self.ofm * self.kernel

    def operations(self, points: float) -> float:
        """Floating-point operations of one step with this many points: forward, backward and weight gradient."""
        return _OPERATIONS * points * self.weights * self.out_size

    def weight_bytes(self, overlap: float) -> float:
        """Bytes of data parallelism: gradients sent and weights received; the share `overlap` of them is concurrent."""
        return ELEMENT_BYTES * self.weights * (2 - overlap)

    def activation_bytes(self, points: float) -> float:
        """Bytes of model parallelism: inputs gathered in the forward pass, and their gradients in the backward pass."""
        return 2 * ELEMENT_BYTES * points * self.ifm * self.in_size


@dataclass(frozen=True, kw_only=True)
class Split:
    """The best split of one layer; bytes are those of one node and step."""

    layer: Layer
    groups: int  # G: N is data parallelism, 1 model parallelism, in between hybrid
    kind: str
    sent_bytes: float
    data_bytes: float  # with data parallelism
    exposed_s: float  # communication that computation does not hide under data parallelism


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The splits of all layers, and the limits of data parallelism."""

    splits: tuple[Split, ...]
    machine_operations_per_byte: float  # a node's speed over its bandwidth
    min_points: int  # least points per node at which data parallelism is balanced
    max_nodes: int  # most nodes at which it is balanced with this batch


def hybrid_bytes(layer: Layer, groups: int, nodes: int, batch: float, overlap: float) -> float:
    """Bytes of a node in a step, with G groups: activations within the group, weights between groups.

    Unlike in the paper's formula, a group of one node gathers nothing, and a single group exchanges no weights.
    """
    activations = 0.0 if groups == nodes else layer.activation_bytes(batch / groups)
    weights = 0.0 if groups == 1 else layer.weight_bytes(overlap) * groups / nodes
    return activations + weights


def min_points_per_node(layers: Sequence[Layer], operations_per_byte: float, overlap: float = 1.0) -> int:
    """Least points per node at which all layers' computation takes as long as sending their weights.

    Args:
        layers: of the network.
        operations_per_byte: a node's operations per second over its bytes per second.
        overlap: as for `balance`.
    """
    operations = sum(layer.operations(1) for layer in layers)
    sent = sum(layer.weight_bytes(overlap) for layer in layers)
    return max(1, math.ceil(operations_per_byte / (operations / sent) - 1e-9))


def exposed_s(
    layers: Sequence[Layer],
    points: float,
    operations_per_s: float,
    bytes_per_s: float,
    overlap: float = 1.0,
) -> list[float]:
    """Seconds of each layer's sending that computation does not hide with data parallelism, in forward order.

    Between a layer's backward pass and its next forward pass lies all work on earlier layers. Ignores contention on the
    link.
    """
    exposed, before = [], 0.0
    for layer in layers:
        exposed.append(max(0.0, layer.weight_bytes(overlap) / bytes_per_s - before / operations_per_s))
        before += layer.operations(points)
    return exposed


def balance(
    layers: Sequence[Layer],  # in order of the forward pass
    *,
    nodes: int,  # N
    batch: int,  # points of all nodes together in one step
    operations_per_s: float,  # floating-point operations per second of a node
    bytes_per_s: float,  # that a node sends
    # From 0 to 1, the share of sending gradients and receiving weights that is concurrent; 1 is a full-duplex link.
    overlap: float = 1.0,
) -> Balance:
    """Each layer's split with the fewest bytes, and the limits of data parallelism.

    >>> layer = Layer(name="fully connected", ifm=4096, ofm=4096)
    >>> found = balance([layer], nodes=64, batch=256, operations_per_s=1e12, bytes_per_s=1e9, overlap=0.0)
    >>> found.splits[0].kind, found.splits[0].groups
    ('hybrid', 2)

    Raises:
        UsageError: no layers, or an argument out of its range.
    """
    if not layers:
        raise UsageError("The model has no convolution and no fully connected layer to balance.")
    if nodes < 1 or batch < 1:
        raise UsageError(f"Nodes and points of a batch must be 1 or more, not {nodes} and {batch}.")
    if not (operations_per_s > 0 and bytes_per_s > 0):
        raise UsageError("A node's operations and bytes per second must be above 0.")
    if not 0 <= overlap <= 1:
        raise UsageError(f"The overlap is a share from 0 to 1, not {overlap}.")
    machine = operations_per_s / bytes_per_s
    exposed = exposed_s(layers, batch / nodes, operations_per_s, bytes_per_s, overlap)
    divisors = [groups for groups in range(1, nodes + 1) if nodes % groups == 0]
    splits = []
    for layer, visible_s in zip(layers, exposed, strict=True):
        sent = {groups: hybrid_bytes(layer, groups, nodes, batch, overlap) for groups in divisors}
        best = min(divisors, key=lambda groups: (sent[groups], -groups))
        splits.append(
            Split(
                layer=layer,
                groups=best,
                kind="data" if best == nodes else "model" if best == 1 else "hybrid",
                sent_bytes=sent[best],
                data_bytes=sent[nodes],
                exposed_s=visible_s if nodes > 1 else 0.0,
            )
        )
    points = min_points_per_node(layers, machine, overlap)
    return Balance(
        splits=tuple(splits),
        machine_operations_per_byte=machine,
        min_points=points,
        max_nodes=max(1, batch // points),
    )
