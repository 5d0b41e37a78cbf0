"""Sparse gradients in rounds: against one process with each round's samples as one batch, in float64."""

from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from algorithms.table_reference import OPTIMIZERS, ROWS, WIDTH, Loop, batches, by
from chosen import each_value

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

IN_ROUNDS = ["lockstep", "all-reduce"]


def check(loop, workers, algorithm, tolerance=1e-12, cluster=None):
    run = pl.simulate(loop, cluster=cluster or pl.Cluster(workers=workers), algorithm=algorithm)
    expected = loop.alone(workers)
    for found in run.returned.values():
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    first, *others = run.returned.values()
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first[0], other[0], strict=True)), "workers have the same bits"
    return run


@pytest.mark.parametrize(
    ("algorithm", "optimizer"), each_value([*IN_ROUNDS, "local-sgd(warmup_steps=100)"], list(OPTIMIZERS))
)
def test_a_round_is_one_step_with_all_samples(algorithm, optimizer):
    check(Loop(optimizer, 25), 2, algorithm)
    check(Loop(optimizer, 23), 3, algorithm)


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("model", [{"bags": True}, {"tied": "tables"}, {"tied": "output"}, {"padding_idx": 3}], ids=str)
def test_kinds_of_tables(algorithm, workers, model):
    check(Loop("adagrad", 24, model=model), workers, algorithm)


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_several_passes_before_a_step(algorithm, own, marked):
    check(Loop("sparse adam and adamw", 24, passes=2, marked=marked, own=own), 2, algorithm)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("optimizer", ["adagrad", "sparse adam and adamw"])
def test_clipping_acts_on_the_mean(optimizer, passes):
    check(Loop(optimizer, clip=0.1, passes=passes), 2, "all-reduce")


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
@pytest.mark.parametrize("infinite", [-1, 0, 7])
@pytest.mark.parametrize("passes", [1, 2])
def test_scalers_leave_the_same_steps_out(algorithm, infinite, passes):
    check(Loop("momentum", infinite=infinite, passes=passes, marked=True), 2, algorithm)


def test_scalers_and_clipping():
    check(Loop("adagrad", infinite=3, clip=0.1), 2, "all-reduce")


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
def test_half_types(algorithm, dtype, rounding):
    """Rounded once per mean, in which 1 sample weighs as much as in one process."""
    loop = Loop("sgd", 7, model={"dtype": dtype})
    run = pl.simulate(loop, cluster=pl.Cluster(workers=3), algorithm=algorithm)
    expected = Loop("sgd", 7, model={"dtype": torch.float64}).alone(3)[0]
    for found, *_ in run.returned.values():
        assert {one.dtype for one in found} == {dtype}
        torch.testing.assert_close([one.double() for one in found], expected, rtol=rounding, atol=rounding)


class Rows(Loop):
    """A large table, of which each batch has rows of its own and some that all have."""

    def __init__(self, rows, own, table=10_000, sparse=True):
        self.rows, self.own, self.table, self.sparse = rows, own, table, sparse

    def __call__(self):
        model = nn.Embedding(self.table, 16, sparse=self.sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for n in worker.batches(list(range(40))):
                optimizer.zero_grad()
                rows = [torch.arange(self.rows), torch.arange(self.own) + self.rows + n * self.own]
                model(torch.cat(rows)).sum().backward()
                optimizer.step()


def sent_bytes(loop, workers=2):
    run = pl.simulate(loop, cluster=pl.Cluster(workers=workers), algorithm="all-reduce")
    return sum(int(of_worker["sent_bytes"].sum()) for of_worker in run.records.values())


def test_bytes_are_those_of_the_rows():
    """Two workers send the union of their rows once each, and the numbers of their own."""
    rows_and_numbers = 40 * ((50 + 2 * 100) * 16 * 4 + (50 + 100) * 4)
    assert rows_and_numbers < sent_bytes(Rows(50, 100)) < 1.05 * rows_and_numbers


def test_a_table_of_which_most_rows_travel_takes_a_bit_more_for_each_row():
    whole, most = (sent_bytes(Rows(n, 0, 6_000, sparse)) for n, sparse in ((6_000, False), (5_999, True)))
    assert 40 * 6_000 / 8 < most - whole < 40 * 6_000 / 8 + 100_000


class Missing(Loop):
    """A table without a module with `sparse=True`."""

    def __call__(self):
        weight = nn.Parameter(torch.ones(ROWS, WIDTH))
        model = nn.ParameterList([weight])
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for _, pairs in worker.batches(batches(8, uneven=False)):
                nn.functional.embedding(pairs[:, 0], weight, sparse=True).sum().backward()
                optimizer.step()


@pytest.mark.parametrize("algorithm", [*IN_ROUNDS, "local-sgd(warmup_steps=3)"])
def test_sparse_gradients_of_other_parameters_are_refused(algorithm):
    with pytest.raises(pl.UsageError, match=r"only weights of nn\.Embedding"):
        pl.simulate(Missing(), workers=2, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["all-reduce(sharded=true)", "all-reduce(codec=qsgd)"])
def test_what_takes_dense_gradients_names_what_takes_sparse_ones(algorithm):
    with pytest.raises(pl.UsageError, match="takes dense gradients, but the model has sparse ones"):
        pl.simulate(Loop("sgd"), workers=2, algorithm=algorithm)


@pytest.mark.parametrize("optimizer", ["decayed", "adam"])
@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_pytorch_refuses_what_it_refuses_in_one_process(algorithm, optimizer, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "decayed", by(partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)))
    monkeypatch.setitem(OPTIMIZERS, "adam", by(partial(torch.optim.Adam, lr=0.1)))
    with pytest.raises(RuntimeError, match="sparse"):
        Loop(optimizer).alone(2)
    with pytest.raises(RuntimeError, match="sparse"):
        pl.simulate(Loop(optimizer), workers=2, algorithm=algorithm)


@pytest.mark.parametrize("kills", [(1, 2), (0, 1), (2, 4)])
def test_survivors_go_on_in_simulations(kills):
    """On one machine: the others make the same update from what the dead worker has brought, or nothing of it."""
    worker, step = kills
    run = pl.simulate(
        Loop("sparse adam and adamw", 24),
        workers=3,
        algorithm="lockstep",
        faults=pl.Faults().kill(worker=worker, step=step),
    )
    assert run.result["workers_lost"] == [worker]
    models = [parameters for parameters, *_ in run.returned.values()]
    assert len(models) == 2
    assert all(torch.equal(*pair) for pair in zip(*models, strict=True))
