"""Collectives and elements of a block, counted: the plan's, and the papers' formulas, exactly."""

from collections import defaultdict

import pytest
import torch

from model_parallel.tensor.threads import CountedAxis, on_each
from paceline.model_parallel.tensor import layers
from paceline.model_parallel.tensor.shapes import Grid, Line, choose_mesh
from paceline.model_parallel.tensor.traffic import Traffic, block_traffic

SIZES = [(12, 2, 12, 6), (24, 5, 36, 12), (36, 3, 24, 12)]  # batch, sequence, hidden, heads
MESHES = [
    *((Line(n), "allgather") for n in (2, 3, 6)),
    *((Grid(*of), mode) for of in ((1, 3), (2, 1), (2, 3), (3, 1)) for mode in ("allgather", "summa")),
]


def one_block(mesh, batch, sequence, hidden, heads):
    block = layers.Block(hidden, heads, mesh).double()
    x = mesh.local_features(mesh.local_batch(torch.ones(batch, sequence, hidden, dtype=torch.float64)))
    block(x.clone().requires_grad_()).square().sum().backward()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("shape", "mode"), MESHES, ids=str)
def test_a_block_sends_what_the_plan_says(shape, mode, sizes):
    found = [defaultdict(Traffic) for _ in range(shape.workers)]
    numbers = iter(range(shape.workers * 10))

    def counted(name, axis):
        each = len(block_axes) + 1
        return CountedAxis(name, axis, found[next(numbers) // each])

    block_axes = ("line",) if isinstance(shape, Line) else ("depth", "row", "column")
    on_each(shape, lambda mesh: one_block(mesh, *sizes), wrap=counted, mode=mode)
    plan = block_traffic(shape, *sizes[:3], mode=mode)
    assert plan
    for worker in found:
        assert dict(worker) == plan


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_plan_is_the_papers_formulas(sizes):
    batch, sequence, hidden, _ = sizes
    for p in (2, 3, 4, 6):
        plan = block_traffic(Line(p), batch, sequence, hidden)
        assert plan == {("line", "all-reduce"): Traffic(4, Line(p).layer_elements(batch, sequence, hidden))}
        assert plan["line", "all-reduce"].elements * p == 8 * (p - 1) * batch * sequence * hidden
    for q in (2, 3):
        for depth in (1, 2, 4):
            plan = block_traffic(Grid(q, depth), batch, sequence, hidden)
            matrices = sum(one.elements for (_, kind), one in plan.items() if kind != "all-reduce")
            seven, twelve = 7 * batch * sequence * hidden, 12 * hidden**2
            assert matrices * q * q * depth == 3 * (q - 1) * (seven + depth * twelve)
            vectors = 2 * (depth - 1) * 13 * hidden * q
            along_depth = plan.get(("depth", "all-reduce"), Traffic()).elements * q * q * depth
            assert along_depth == 2 * (depth - 1) * twelve + vectors
            everything = matrices + (along_depth - vectors) / (q * q * depth)
            assert everything == Grid(q, depth).layer_elements(batch, sequence, hidden)
            summa = block_traffic(Grid(q, depth), batch, sequence, hidden, mode="summa")
            assert sum(one.elements for one in summa.values()) == sum(one.elements for one in plan.values())


def test_the_chosen_mesh_sends_least():
    sizes, meshes = (2048, 8192), (Line(64), Grid(8), Grid(4, 4))
    found = [[f"{float(mesh.layer_elements(batch, *sizes)):.3g}" for mesh in meshes] for batch in (16, 64)]
    assert found == [["2.11e+09", "8.81e+08", "7.93e+08"], ["8.46e+09", "2.73e+09", "1.59e+09"]]
    assert choose_mesh(64, 16, *sizes) == Grid(4, 4)
    assert choose_mesh(64, 64, *sizes) == Grid(2, 16), "with more samples, more of them apart"
    assert choose_mesh(64, 64, *sizes, largest_share=1 / 16) == Grid(4, 4)
    assert choose_mesh(64, 8, *sizes) == Grid(8), "16 parts do not divide a batch of 8"
    for workers in (2, 3, 5):
        assert choose_mesh(workers, 60, 8, 60) == Line(workers)
