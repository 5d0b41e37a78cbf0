"""A loop's own loss on a mesh: the gradient is that of the mean of the workers' losses, on every mesh."""

import itertools
from functools import cache

import pytest
import torch

from chosen import each_value
from model_parallel.tensor import losses
from model_parallel.tensor.threads import on_each
from paceline import model_parallel as mp
from paceline.errors import UsageError
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.model_parallel.tensor.shapes import Grid, Line

KINDS = [(Line(3), "allgather"), (Grid(1, 2), "allgather"), (Grid(2), "allgather"), (Grid(2), "summa")]
OTHERS = [
    *((Line(workers), "allgather") for workers in (1, 2, 4)),
    (Grid(1, 3), "summa"),
    *((Grid(2, 2), mode) for mode in ("summa", "allgather")),
    (Grid(3), "allgather"),
]
LOSSES = [*losses.MEANS, *losses.PENALISED]
CLOSE = {"rtol": 0.0, "atol": 1e-12}


@cache
def alone(loss):
    return losses.trained(Mesh.alone(), loss)


def check(found, expected):
    (gradients, after, norm, _), (other_gradients, other_after, other_norm, _) = found, expected
    for mine, theirs in ((gradients, other_gradients), (after, other_after)):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, **CLOSE, msg=lambda text, n=name: f"{n}: {text}")
    torch.testing.assert_close(norm, other_norm, **CLOSE)


@pytest.mark.parametrize(
    ("mesh", "loss"),
    [*itertools.product(KINDS, LOSSES), *each_value(OTHERS, LOSSES)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_gradients_of_any_mean_are_those_of_one_process(mesh, loss):
    """Three steps of two passes each, with clipping; every loss on each kind of mesh."""
    shape, mode = mesh
    expected = alone(loss)
    for found in on_each(shape, lambda mesh: losses.trained(mesh, loss), mode=mode, bucket_bytes=3000):
        check(found, expected)
        if loss in losses.MEANS:
            torch.testing.assert_close(found[3], expected[3], **CLOSE)


@pytest.mark.parametrize(("shape", "mode"), [*KINDS, *OTHERS], ids=str)
def test_a_sum_counts_as_the_mean_of_the_workers_sums(shape, mode):
    """As under data parallelism: a line's workers have all of it, a grid's each have a part."""
    expected = alone(losses.sum_of_squares)
    parts = 1 if isinstance(shape, Line) else shape.workers

    def program(mesh):
        return losses.trained(mesh, losses.sum_of_squares, scale=parts)

    for found in on_each(shape, program, mode=mode):
        check(found, expected)


def test_whole_features_are_those_of_one_process_or_refused():
    whole = torch.arange(12.0).view(2, 6)

    def program(mesh):
        part = whole.chunk(mesh.hidden.size, 1)[mesh.hidden.index]
        assert mp.whole_features(whole, 6, mesh) is whole
        with pytest.raises(UsageError, match="5 features of 12 are neither all nor this worker's part"):
            mp.whole_features(torch.zeros(2, 5), 12, mesh)
        return mp.whole_features(part, 6, mesh)

    for shape in (Line(3), Grid(2, 2)):
        for found in on_each(shape, program):
            assert torch.equal(found, whole)
