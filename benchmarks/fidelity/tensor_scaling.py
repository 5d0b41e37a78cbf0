"""A transformer's step on 64 and 128 simulated GPUs: a line (1-D), a square (2-D), and squares that share the batch (2.5-D).

    python benchmarks/fidelity/tensor_scaling.py [--write]

A schedule, timing only, on two classes of links: `summa.py`'s machine and its loop for grids, and here the line, as
`paceline.model_parallel` has it: two sums of activations in the forward pass, which are waited for, and two in the backward
pass, which go on beside the product that makes a weight's gradient. Takes a second. From Python, for another model:

    step_s(Grid(4, 4), Model(layers=24, hidden=4096, batch=256), Machine(network_bytes_per_s=12.5e9))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import summa
from page import show
from summa import ELEMENT_BYTES, NODE, SEQUENCE, Machine

from paceline.model_parallel import Grid, Line

HEAD = 64  # features of an attention's head
# Inputs and outputs of a layer's products, in units of hidden, and whether a line cuts the outputs (else the inputs).
LINE_PRODUCTS = ((1, 3, True), (1, 1, False), (1, 4, True), (4, 1, False))
WORKERS = (64, 128)


@dataclass(frozen=True)
class Model:
    """A stack of transformer layers; embeddings, the output layer and the optimizer are left out.

    Args:
        layers: how many.
        hidden: features.
        batch: sequences of all workers, of `summa.SEQUENCE` tokens.
    """

    layers: int
    hidden: int
    batch: int


MODELS = tuple(Model(24, hidden, batch) for hidden in (4096, 8192, 16384) for batch in (64, 256))


def ring_s(elements: float, stride: int, size: int, machine: Machine) -> float:
    """An all-reduce of so many elements by a ring of `size` workers, `stride` numbers apart."""
    sent = 2 * (size - 1) / size * ELEMENT_BYTES * elements
    return 2 * (size - 1) * machine.latency_s + sent / machine.channel(stride, size)


def line_layer_s(line: Line, batch: int, hidden: int, machine: Machine) -> float:
    """A layer's forward and backward pass on a line."""
    tokens, total = batch * SEQUENCE, 0.0
    sum_s = ring_s(tokens * hidden, 1, line.workers, machine)
    for inputs, outputs, cuts_outputs in LINE_PRODUCTS:
        compute_s = 2 * tokens * inputs * outputs * hidden**2 / line.workers / machine.flops_per_s
        if cuts_outputs:  # Y = X W, gX = gY W', and the sum of gX beside gW = X' gY
            total += 2 * compute_s + max(compute_s, sum_s)
        else:  # Y = X W and its sum, gX, gW
            total += 3 * compute_s + sum_s
    return total + 3 * 4 * tokens * SEQUENCE * hidden / line.workers / machine.flops_per_s


def step_s(mesh: Line | Grid, model: Model, machine: Machine) -> float:
    """Seconds of one step, of a mesh that divides the model."""
    one_s = line_layer_s if isinstance(mesh, Line) else summa.layer_s
    return model.layers * one_s(mesh, model.batch, model.hidden, machine)


def compute_s(mesh: Line | Grid, model: Model, machine: Machine) -> float:
    """Of these, what the products take where nothing is sent: the same on all meshes of so many workers."""
    return step_s(mesh, model, Machine(machine.flops_per_s, math.inf, math.inf, 0.0))


def meshes(workers: int) -> list[Line | Grid]:
    """The line, and all grids of more than one column."""
    sides = [q for q in range(workers, 1, -1) if workers % (q * q) == 0]
    return [Line(workers), *(Grid(q, workers // q**2) for q in sides)]


def divides(mesh: Line | Grid, model: Model) -> bool:
    """Whether heads, features and the batch can be cut over it."""
    heads = model.hidden // HEAD
    return heads % mesh.hidden_parts == 0 and model.batch % mesh.batch_parts == 0


def table(workers: int, machine: Machine) -> list[str]:
    """Milliseconds of a step, and the share of it that is computing, by model and mesh."""
    shapes = meshes(workers)
    names = [f"line of {workers}", *(f"{m.q} x {m.q} x {m.depth}" for m in shapes if isinstance(m, Grid))]
    rows = [f"| hidden, batch | {' | '.join(names)} | fastest |", "|---" * (len(shapes) + 2) + "|"]
    for model in MODELS:
        took = {m: 1e3 * step_s(m, model, machine) for m in shapes if divides(m, model)}
        cells = [
            f"{took[m]:.0f} ({1e3 * compute_s(m, model, machine) / took[m]:.0%})" if m in took else "cannot"
            for m in shapes
        ]
        least = min(took.values())
        are_alike = max(took.values()) < least * (1 + 1e-9)
        best = "all alike" if are_alike else names[shapes.index(min(took, key=took.__getitem__))]
        rows.append(f"| {model.hidden}, {model.batch} | {' | '.join(cells)} | {best} |")
    return rows


def memory_table(workers: int) -> list[str]:
    """What a worker has of the matrices and of the activations between layers."""
    rows = ["| mesh | of the matrices | of the activations |", "|---|---|---|"]
    for mesh in meshes(workers):
        parts = 1 if isinstance(mesh, Line) else mesh.batch_parts * mesh.q
        whole = "all" if parts == 1 else f"1 / {parts}"
        rows.append(f"| {mesh} | 1 / {round(1 / mesh.parameter_share)} | {whole} |")
    return rows


def page() -> list[str]:
    """All of it."""
    plain = Machine()
    lines = [
        "# One, two and two and a half dimensions on 64 and 128 workers, simulated",
        "",
        "Printed by `python benchmarks/fidelity/tensor_scaling.py`. Milliseconds of one step of 24 transformer layers, and in"
        f" brackets the share of it that is computing. Sequences of {SEQUENCE}, heads of {HEAD}, half precision, {NODE} GPUs"
        f" to a node; assumed are {plain.flops_per_s / 1e12:.0f} TFLOP/s, {plain.inside_bytes_per_s / 1e9:.0f} GB/s within a"
        f" node, {plain.network_bytes_per_s / 1e9:.0f} GB/s from a node to the network, which its GPUs share, and"
        f" {plain.latency_s * 1e6:.0f} us for a hop. No machine of 64 was measured. A mesh that does not divide heads or batch"
        " cannot train the model.",
    ]
    for workers in WORKERS:
        lines += ["", f"{workers} workers:", "", *table(workers, plain)]
    one_class = Machine(inside_bytes_per_s=plain.network_bytes_per_s)
    lines += [
        "",
        f"64 workers whose links within a node are as slow as the network, {plain.network_bytes_per_s / 1e9:.0f} GB/s (a"
        " control: rows within a node gain nothing then):",
        "",
        *table(64, one_class),
        "",
        "64 workers whose links cost nothing (a control: all of a step is computing, on every mesh alike):",
        "",
        *table(64, Machine(plain.flops_per_s, math.inf, math.inf, 0.0)),
        "",
        "What a worker has of 64 workers' model, which a step's time does not show:",
        "",
        *memory_table(64),
        "",
        *verdict(plain),
    ]
    return lines


def verdict(machine: Machine) -> list[str]:
    """Which mesh is how often the fastest."""
    said = []
    for workers in WORKERS:
        wins: dict[str, int] = {}
        for model in MODELS:
            possible = [m for m in meshes(workers) if divides(m, model)]
            best = str(min(possible, key=lambda m, model=model: step_s(m, model, machine)))
            wins[best] = wins.get(best, 0) + 1
        told = ", ".join(f"{name} in {number}" for name, number in sorted(wins.items(), key=lambda one: -one[1]))
        said.append(f"Of {len(MODELS)} models on {workers} workers the fastest is {told}.")
    return [" ".join(said) + " The more squares there are, the more of the model is on each worker."]


if __name__ == "__main__":
    show(page(), __file__)
