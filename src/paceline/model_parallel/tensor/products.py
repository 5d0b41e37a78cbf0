"""The three products of a matrix cut over a grid, each by all-gathers or as a loop of broadcasts (SUMMA).

Worker (i, j) has part j of the features of an activation X (tokens, features), and block (i, j) of a weight W (inputs,
outputs):

    multiply              Y_j = sum_t X_t W_tj        X_t from column t, W_tj from row t
    multiply_transposed   Y_t = sum_j X_j W_tj'       W_tj from row t; added up along the row, into column t
    weight_gradient       G_tj = sum_i X_t' Y_j       X_t from column t; added up along the column, into row t

Both ways move the same elements. The loop holds two blocks at a time instead of q, and multiplies one while the next arrives.
A weight may be stored as its transpose (outputs, inputs), like PyTorch's linear layers: `turned`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.model_parallel.axes import Axis, side_by_side
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.ports.ports import Handle


def multiply(x: Tensor, weight: Tensor, mesh: Mesh, *, turned: bool) -> Tensor:
    """X W, (tokens, outputs / q) of `x` (tokens, inputs / q)."""
    columns, rows = mesh.axes["column"], mesh.axes["row"]
    if mesh.mode == "allgather":
        whole_x = side_by_side(columns.all_gather(x))
        blocks = rows.all_gather(weight)
        return whole_x @ (side_by_side(blocks).T if turned else blocks.flatten(0, 1))
    y = None
    for x_t, w_t in zip(_blocks(x, columns), _blocks(weight, rows), strict=True):
        w_t = w_t.T if turned else w_t
        y = x_t @ w_t if y is None else y.addmm_(x_t, w_t)
    assert y is not None
    return y


def multiply_transposed(x: Tensor, weight: Tensor, mesh: Mesh, *, turned: bool) -> Tensor:
    """X W', (tokens, inputs / q) of `x` (tokens, outputs / q)."""
    columns, rows = mesh.axes["column"], mesh.axes["row"]
    if mesh.mode == "allgather":
        blocks = rows.all_gather(weight)
        return columns.reduce_scatter(x @ (blocks if turned else blocks.mT))
    return _reduced((x @ (w_t if turned else w_t.T) for w_t in _blocks(weight, rows)), columns)


def weight_gradient(x: Tensor, y: Tensor, mesh: Mesh, *, turned: bool) -> Tensor:
    """X' Y, a block as the weight's, of `x` (tokens, inputs / q) and `y` (tokens, outputs / q)."""
    columns, rows = mesh.axes["column"], mesh.axes["row"]
    if mesh.mode == "allgather":
        blocks = columns.all_gather(x)
        return rows.reduce_scatter(y.T @ blocks if turned else blocks.mT @ y)
    return _reduced((y.T @ x_t if turned else x_t.T @ y for x_t in _blocks(x, columns)), rows)


def _blocks(mine: Tensor, axis: Axis) -> Iterator[Tensor]:
    """The block of each worker along the axis in turn; prefetches the next while one is used."""
    mine = mine.contiguous()
    buffers: list[Tensor | None] = [None, None]

    def start(t: int) -> tuple[Tensor, Handle]:
        if t == axis.index:
            block = mine
        else:
            if (buffer := buffers[t % 2]) is None:
                buffer = buffers[t % 2] = torch.empty_like(mine)
            block = buffer
        return block, axis.start_broadcast(block, t)

    ahead = start(0)
    for t in range(axis.size):
        block, started = ahead
        started.wait()
        if t + 1 < axis.size:
            ahead = start(t + 1)
        yield block


def _reduced(products: Iterator[Tensor], axis: Axis) -> Tensor:
    """The t-th product, summed over the axis, for worker t; one is sent while the next is computed."""
    mine = before = None
    for t, product in enumerate(products):
        if before is not None:
            before.wait()
        product = product.contiguous()
        before = axis.start_reduce(product, t)
        if t == axis.index:
            mine = product
    assert before is not None
    assert mine is not None
    before.wait()
    return mine
