"""Traffic of one transformer layer on a mesh, operation by operation: the papers' formulas, which tests verify by counting."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from paceline.model_parallel.tensor.shapes import Grid, Line, Mode

_PRODUCTS = ((1, 3), (1, 1), (1, 4), (4, 1))  # inputs and outputs, in units of hidden
_MATRICES, _VECTORS = 12, 13  # a block's parameters, in units of hidden squared and of hidden


@dataclass(frozen=True)
class Traffic:
    """Operations of one kind along one axis."""

    calls: int = 0  # number of collectives
    elements: Fraction = Fraction(0)  # that each worker sends in all of them, on average

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.elements + other.elements)


def sent_elements(kind: str, workers: int, elements: int | Fraction) -> Fraction:
    """Elements that each worker sends, on average, if the algorithm is optimal.

    >>> [str(sent_elements(kind, 4, 100)) for kind in ("all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce")]
    ['300', '75', '150', '75', '75']
    """
    factor = {"all-gather": Fraction(workers), "all-reduce": Fraction(2)}.get(kind, Fraction(1))
    return factor * Fraction(workers - 1, workers) * elements


def block_traffic(
    shape: Line | Grid, batch: int, sequence: int, hidden: int, *, mode: Mode = "allgather"
) -> dict[tuple[str, str], Traffic]:
    """Traffic of a `Block`'s forward and backward pass, by axis and kind, including gradient sums in one bucket each.

    Args:
        shape: the mesh.
        batch: sequences of all workers.
        sequence: tokens of each.
        hidden: features.
        mode: of products.
    """
    found: dict[tuple[str, str], Traffic] = defaultdict(Traffic)

    def add(axis: str, kind: str, elements: int | Fraction, calls: int = 1) -> None:
        if (workers := shape.axes[axis].size) > 1:
            found[axis, kind] += Traffic(calls, calls * sent_elements(kind, workers, elements))

    if isinstance(shape, Line):
        add("line", "all-reduce", batch * sequence * hidden, calls=4)
        return dict(found)
    q, tokens = shape.q, Fraction(batch * sequence, shape.batch_parts)
    for inputs, outputs in _PRODUCTS:
        x, weight = tokens * inputs * hidden / q, Fraction(inputs * outputs * hidden**2, q * q)
        for axis, block in (("column", x), ("row", weight)):
            if mode == "summa":
                add(axis, "broadcast", block, calls=2 * q)
                add(axis, "reduce", block, calls=q)
            else:
                add(axis, "all-gather", block, calls=2)
                add(axis, "reduce-scatter", q * block)
    add("column", "all-reduce", 2 * tokens, calls=4)  # two normalisations, forward and backward
    vectors, matrices = Fraction(_VECTORS * hidden, q), Fraction(_MATRICES * hidden**2, q * q)
    add("row", "all-reduce", vectors)
    if q > 1:
        add("depth", "all-reduce", vectors)
        add("depth", "all-reduce", matrices)
    else:
        add("depth", "all-reduce", vectors + matrices)
    return dict(found)
