"""What a tensor layout cannot do is one sentence before the first step; and what a loop may not do, at the step."""

import re
from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from model_parallel.tensor.model import HIDDEN, OPTIMIZERS, built
from model_parallel.tensor.run_loops import loop
from paceline import model_parallel as mp
from paceline.model_parallel.tensor.worker_part import WorkerPart


def of_layers(**changed):
    sizes = {"features": HIDDEN, "heads": 12, "vocabulary": 24, **changed}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mesh = mesh = mp.Mesh.alone()
            self.token = mp.Embedding(sizes["vocabulary"], sizes["features"], mesh)
            self.block = mp.Block(sizes["features"], sizes["heads"], mesh)

    return Model()


def with_a_linear_of_its_own():
    model = of_layers()
    model.more = nn.Linear(2, 2)
    return model


def with_a_sparse_table():
    model = of_layers()
    model.table = nn.Embedding(4, 2, sparse=True)
    return model


def on_two_meshes():
    model = of_layers()
    model.more = mp.Linear(8, 8, mp.Mesh.alone())
    return model


def tied_two_ways():
    model = built(mp.Mesh.alone(), is_tied=False)
    model.head.weight = model.token.weight
    return model


def with_a_dropout_along_nothing():
    model = of_layers()
    model.dropout = mp.Dropout(0.1, model.mesh, axis="line")
    return model


@pytest.mark.parametrize(
    ("layout", "workers", "algorithm", "model", "says"),
    [
        (
            "tensor(line=3)",
            4,
            "all-reduce",
            of_layers,
            "A line of 3 needs 3 workers for each replica, but",
        ),
        ("tensor(q=2)", 6, "all-reduce", of_layers, "A grid of 2 x 2 needs 4 workers"),
        ("tensor(q=2, depth=2)", 4, "all-reduce", of_layers, "A grid of 2 x 2 x 2 needs 8 workers"),
        ("tensor(q=2, line=2)", 4, "all-reduce", of_layers, "a line or a grid"),
        ("tensor()", 4, "all-reduce", of_layers, "a line or a grid"),
        ("tensor(line=2, depth=2)", 4, "all-reduce", of_layers, "a line or a grid"),
        ("tensor(line=2, mode=summa)", 2, "all-reduce", of_layers, "A line of workers multiplies without broadcasts"),
        ("tensor(line=2)", 2, "hogwild", of_layers, "hogwild does not work with a tensor layout"),
        ("tensor(line=2)", 2, "ad-psgd", of_layers, "ad-psgd does not work with a tensor layout"),
        ("tensor(line=2)", 2, "d-psgd", of_layers, "d-psgd does not work with a tensor layout"),
        ("tensor(line=2)", 2, "parameter-server", of_layers, "parameter-server does not work with a tensor layout"),
        ("tensor(line=2)", 2, "all-reduce(shares=auto)", of_layers, "depends on each worker's own measurements"),
        ("tensor(line=2)", 2, "da-sgd(delay=auto)", of_layers, "depends on each worker's own measurements"),
        (
            "tensor(line=3)",
            3,
            "all-reduce",
            partial(of_layers, vocabulary=25),
            "of 25 cannot be cut into 3 equal parts",
        ),
        ("tensor(line=3)", 3, "all-reduce", partial(of_layers, heads=4), "A number of heads of 4 cannot be cut into 3"),
        (
            "tensor(line=3)",
            3,
            "all-reduce",
            partial(of_layers, heads=2),
            "Attention with 2 heads cannot be cut over 3",
        ),
        ("tensor(q=2)", 4, "all-reduce", partial(of_layers, vocabulary=25), "of 25 cannot be cut into 2 equal parts"),
        ("tensor(q=2)", 4, "all-reduce", with_a_dropout_along_nothing, "axis='features'"),
        ("tensor(q=2)", 4, "all-reduce", with_a_linear_of_its_own, "more.weight belongs to no layer"),
        ("tensor(line=2)", 2, "all-reduce", with_a_sparse_table, "table.weight belongs to no layer"),
        ("tensor(line=2)", 2, "lockstep", with_a_sparse_table, "table.weight belongs to no layer"),
        ("tensor(line=2)", 2, "downpour", with_a_sparse_table, "table.weight belongs to no layer"),
        ("tensor(q=2)", 4, "all-reduce", on_two_meshes, "one mp.Mesh.alone()"),
        ("tensor(q=2)", 4, "all-reduce", tied_two_ways, "shared with a layer that cuts it in another way"),
        ("tensor(line=2)", 2, "all-reduce", lambda: nn.Linear(4, 4), "The model has no layer on a mesh"),
    ],
)
def test_what_does_not_fit(layout, workers, algorithm, model, says):
    def train():
        own = model()
        with pl.attach(own, OPTIMIZERS["momentum"](own.parameters()), algorithm, layout=layout):
            raise AssertionError("training has begun")

    with pytest.raises(pl.UsageError, match=re.escape(says)) as refused:
        pl.launch(train, workers=workers, backend="threads")
    assert "\n" not in str(refused.value)
    assert ": " in str(refused.value), "what is wrong: the remedy"


def test_the_optimizers_that_a_refusal_names_are_accepted():
    model = of_layers()
    for optimizer in (torch.optim.LBFGS, torch.optim.Adagrad):
        with pytest.raises(pl.UsageError) as refused:
            pl.attach(model, optimizer(model.parameters()), "all-reduce", layout="tensor(line=2)")
        remedy = str(refused.value).rpartition(": ")[2]
        named = [one for one in re.findall(r"\w+", remedy) if isinstance(getattr(torch.optim, one, None), type)]
        assert named
        for one in named:
            pl.attach(
                model, getattr(torch.optim, one)(model.parameters(), lr=0.1), "all-reduce", layout="tensor(line=2)"
            )


def test_an_optimizer_that_has_state_or_looks_at_whole_matrices():
    model = of_layers()
    with pytest.raises(pl.UsageError, match="LBFGS may keep state"):
        pl.attach(model, torch.optim.LBFGS(model.parameters()), "all-reduce", layout="tensor(line=2)")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    optimizer.step()
    with pytest.raises(pl.UsageError, match="must start without state"):
        pl.attach(model, optimizer, "all-reduce", layout="tensor(line=2)")


def test_example_inputs_and_simulations_and_tasks():
    model = of_layers()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(pl.UsageError, match="leave them out"):
        pl.attach(model, optimizer, "all-reduce", layout="tensor(line=2)", example_inputs=torch.zeros(2, 2))
    with pytest.raises(pl.UsageError, match=r"needs your own loop.*paceline\.attach"):
        pl.train(pl.TrainConfig(task="digits-mlp", workers=2, algorithm="all-reduce", layout="tensor(line=2)"))


@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("algorithm", ["all-reduce", "local-sgd"])
def test_clipping_by_torch_is_refused_as_workers_would_clip_differently(algorithm, workers, replicas, tmp_path):
    with pytest.raises(pl.UsageError, match=r"clip by worker\.clip_grad_norm_"):
        pl.launch(
            partial(
                loop, "tensor(line=2)", tmp_path, torch_clip=True, clip=None, algorithm=algorithm, replicas=replicas
            ),
            workers=workers,
            backend="threads",
        )


def test_a_batch_that_the_mesh_does_not_divide(tmp_path):
    def train():
        mesh = mp.Mesh.alone()
        model = built(mesh)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        with pl.attach(model, optimizer, "all-reduce", layout=pl.TensorParallel(q=2)) as worker:
            for batch in worker.batches([torch.zeros(3, 5)]):
                mesh.local_batch(batch)

    with pytest.raises(pl.UsageError, match="A batch of 3 cannot be cut into 2 equal parts"):
        pl.launch(train, workers=4, backend="threads")


def test_what_is_refused_leaves_the_model_as_it_was():
    model = of_layers(vocabulary=25)
    with pytest.raises(pl.UsageError, match="of 25 cannot be cut"):
        WorkerPart(pl.TensorParallel(line=2), model, 0, 2, seed=0)
    assert str(model.mesh.shape) == "a line of 1"
    assert model.token.weight.shape == (25, HIDDEN)
