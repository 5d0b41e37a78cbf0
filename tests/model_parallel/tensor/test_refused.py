"""What a mesh would train wrongly, or cannot cut, is refused in one sentence before the first step."""

import re

import pytest
import torch
from torch import nn

from model_parallel.tensor.model import built, data
from model_parallel.tensor.threads import on_each
from paceline import model_parallel as mp
from paceline.errors import UsageError

LINE_1 = mp.Line(1)
GRID = mp.Grid(2, 2)


def on(shape, program):
    """Refused on every worker alike."""

    def refused(mesh):
        with pytest.raises(UsageError) as caught:
            program(mesh)
        return str(caught.value)

    (sentence,) = set(on_each(shape, refused))
    assert re.fullmatch(r"[^.\n].*[^.]: .*\.", sentence), "what is wrong: the remedy"
    return sentence


@pytest.mark.parametrize(
    ("shape", "program", "says"),
    [
        (mp.Line(3), lambda mesh: mp.Linear(4, 8, mesh), "Linear's weight of 8 cannot be cut into 3 equal parts"),
        (mp.Line(3), lambda mesh: mp.Linear(4, 8, mesh, cut="inputs"), "weight of 4 cannot be cut into 3"),
        (GRID, lambda mesh: mp.Linear(4, 7, mesh), "weight of 7 cannot be cut into 2"),
        (GRID, lambda mesh: mp.LayerNorm(5, mesh), "LayerNorm's weight of 5 cannot be cut into 2"),
        (GRID, lambda mesh: mp.Embedding(65, 8, mesh), "Embedding's weight of 65 cannot be cut into 2"),
        (GRID, lambda mesh: mesh.local_batch(torch.zeros(6, 2)), "A batch of 6 cannot be cut into 4"),
        (
            mp.Line(3),
            lambda mesh: mp.Attention(12, 2, mesh),
            "2 heads cannot be cut over 3 workers, each of which needs a head",
        ),
        (mp.Line(3), lambda mesh: mp.Attention(12, 4, mesh), "A number of heads of 4 cannot be cut into 3"),
        (GRID, lambda mesh: mp.Attention(12, 5, mesh), "12 features are not a multiple of 5 heads"),
        (GRID, lambda mesh: mp.Dropout(1.0, mesh), "probability is 1.0"),
        (GRID, lambda mesh: mp.Linear(4, 4, mesh, cut="rows"), "no 'rows' to cut"),
    ],
)
def test_shapes(shape, program, says):
    assert says in on(shape, program)


def tied_two_ways(mesh):
    model = built(mesh, is_tied=False)
    model.head.weight = model.token.weight
    return model


@pytest.mark.parametrize("shape", [mp.Line(2), GRID], ids=str)
def test_tied_weights_that_are_cut_two_ways(shape):
    """On a line both cut the vocabulary, so that it is right there."""

    def forward(mesh):
        tokens, following, more = (mesh.local_batch(one) for one in data(0))
        tied_two_ways(mesh)(tokens, following, mesh.local_features(more))

    if isinstance(shape, mp.Line):
        on_each(shape, forward)
        on_each(shape, lambda mesh: mp.check_model(tied_two_ways(mesh)))
        return
    assert "cut in different ways" in on(shape, forward)
    assert "head.weight is shared with a layer that cuts it in another way" in on(
        shape, lambda mesh: mp.check_model(tied_two_ways(mesh))
    )


def test_a_parameter_of_no_layer_on_the_mesh():
    def program(mesh):
        mp.check_model(nn.Sequential(mp.Linear(4, 4, mesh), nn.LayerNorm(2)))

    assert "1.weight belongs to no layer of paceline.model_parallel" in on(GRID, program)
    with pytest.raises(UsageError, match="has no layer on a mesh"):
        mp.full_state_dict(nn.Linear(2, 2))


def test_an_optimizer_that_looks_at_whole_matrices():
    model = built(mp.Mesh.open(LINE_1))
    mp.check_model(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(
        UsageError, match="LBFGS may look at more of a matrix than the part that a worker has: choose one of"
    ):
        mp.check_model(model, torch.optim.LBFGS(model.parameters()))


def test_meshes():
    with pytest.raises(UsageError, match="A grid of 2 x 2 needs 4 workers, and there are 1: start 4"):
        mp.Mesh.open("2x2")
    with pytest.raises(UsageError, match="A line of workers multiplies without broadcasts"):
        mp.Mesh.open("line 1", mode="summa")
    with pytest.raises(UsageError, match="'cannon' is not a mode of multiplication"):
        mp.Mesh.open("1x1", mode="cannon")
    for text in ("2x3", "2x2x2x2", "", "cube", "line 2x2", "-", "2x2x"):
        with pytest.raises(UsageError, match="is not a mesh: write"):
            mp.parse_mesh(text)
    for make in (lambda: mp.Line(0), lambda: mp.Grid(2, 0), lambda: mp.Grid(True), lambda: mp.parse_mesh("0x0")):
        with pytest.raises(UsageError, match="is not a size of a mesh"):
            make()
    assert (mp.parse_mesh("4"), mp.parse_mesh("line 4"), mp.parse_mesh(" 2X2 ")) == (mp.Line(4), mp.Line(4), mp.Grid(2))
    with pytest.raises(UsageError, match="No mesh of 4 workers divides a batch of 3, 7 features"):
        mp.choose_mesh(4, 3, 5, 7)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mp.nothing  # noqa: B018
    assert set(mp.__all__) <= set(dir(mp))
    assert all(getattr(mp, name) is not None for name in mp.__all__)


@pytest.mark.parametrize("shape", [mp.Line(2), mp.Grid(2)], ids=str)
def test_tokens_that_the_vocabulary_has_not(shape):
    def embedded(token):
        return lambda mesh: mp.Embedding(8, 4, mesh)(torch.tensor([[0, token]]))

    def loss(mesh):
        return mp.cross_entropy(torch.zeros(2, 4), torch.tensor([3, -100]), mesh)

    assert "outside the vocabulary of 8; the tokens go from -100 to 3" in on(shape, loss)
    assert "from 0 to 8" in on(shape, embedded(8))
    assert "from -1 to 0" in on(shape, embedded(-1))


def test_workers_with_other_samples_find_out():
    def loss(mesh):
        return mp.cross_entropy(torch.zeros(2, 4), torch.tensor([3, mesh.axes["world"].index]), mesh)

    assert "give all workers the same batches" in on(mp.Line(2), loss)


def test_half_precision():
    model = built(mp.Mesh.open(LINE_1)).bfloat16()
    with pytest.raises(UsageError, match=r"token\.weight is torch\.bfloat16, in which sums over workers lose"):
        mp.check_model(model)
    with torch.autocast("cpu"), pytest.raises(UsageError, match=r"outside torch\.autocast"):
        built(mp.Mesh.open(LINE_1))(*data(0))
