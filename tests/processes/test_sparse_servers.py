"""Servers of sparse gradients in real processes: whoever dies, each row has had each of its updates once."""

import os
import signal
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from contracts.programs import BATCH_SIZE, AddUp, planted
from paceline.algorithms.server.client import Client
from paceline.data.plan import BatchPlan
from processes.shards import check_losses, check_versions, run_and_kill_shards

ROWS, WIDTH = 61, 48  # a shard begins within a row


class AddUpRows(AddUp):
    """Adds each value of a batch to all of one row."""

    def __call__(self):
        model = nn.Embedding(ROWS, WIDTH, sparse=True)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = torch.utils.data.TensorDataset(torch.tensor(planted(self.num_batches), dtype=torch.float32))
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
        with pl.attach(model, optimizer) as worker:
            for _ in range(self.epochs):
                for (values,) in worker.batches(loader):
                    optimizer.zero_grad()
                    (-model(values.long() % ROWS) * values.unsqueeze(1)).sum().backward()
                    self.before_step(worker)
                    optimizer.step()

    def before_step(self, worker):
        """Nothing."""


def table_of(parameters):
    """Each row's value, the same in all its elements; the table lies behind 64 bytes of padding."""
    table = parameters.x[16 : 16 + ROWS * WIDTH].view(ROWS, WIDTH)
    assert torch.equal(table, table[:, :1].expand(-1, WIDTH))
    return table[:, 0].tolist()


def expected(records):
    """Each row's value after the batches of these records."""
    values = torch.tensor(planted())
    plan, table = BatchPlan(num_samples=len(values), batch_size=BATCH_SIZE, seed=0), [0.0] * ROWS
    for batch in records["batch"]:
        for value in values[plan.indices(int(batch))].tolist():
            table[int(value) % ROWS] += value
    return table


def test_both_shards_are_killed_and_their_copies_take_over():
    algorithm = pl.ParameterServer(mode=pl.Async(), durability="replica", shards=2)
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(0, 50), (1, 150)], program=AddUpRows)
    assert table_of(parameters) == expected(check_versions(run, parameters, restarts=2))


def test_a_shard_without_a_copy_is_killed_and_what_is_lost_is_reported():
    algorithm = pl.ParameterServer(mode=pl.Async(), snapshot_s=0.05)
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(0, 120), (0, 400)], program=AddUpRows)
    assert table_of(parameters) == expected(check_losses(run, restarts=2))


class TwoOptimizers(AddUpRows):
    """SparseAdam for a table, Adam for the rest; shard 1 has rows of the table and all of the rest."""

    def __call__(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
        optimizers = [
            torch.optim.SparseAdam([model[0].weight], lr=0.01),
            torch.optim.Adam(model[1].parameters(), lr=0.01),
        ]
        with pl.attach(model, optimizers) as worker:
            for _ in range(self.epochs):
                for batch in worker.batches([torch.arange(n, n + 4) for n in range(40)]):
                    for one in optimizers:
                        one.zero_grad()
                    model(batch).square().mean().backward()
                    for one in optimizers:
                        one.step()


@pytest.mark.parametrize("durability", ["snapshot", "replica"])
def test_a_shard_of_two_optimizers_is_killed(durability):
    snapshot = {"snapshot_s": 0.0} if durability == "snapshot" else {}
    algorithm = pl.ParameterServer(mode=pl.Async(), shards=2, durability=durability, **snapshot)
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(1, 50), (0, 125)], program=TwoOptimizers)
    assert (run.result["outcome"], run.result["server_restarts"]) == ("stopped", 2)
    assert torch.isfinite(parameters.x).all()


def test_a_run_of_two_optimizers_is_resumed_with_another_number_of_shards(tmp_path):
    first = pl.ParameterServer(mode=pl.Async(), shards=2)
    pl.launch(TwoOptimizers(0, epochs=2), workers=2, algorithm=first, out=tmp_path / "first")
    second = pl.ParameterServer(mode=pl.Async(), shards=3)
    run = pl.launch(
        TwoOptimizers(0, epochs=3), workers=2, algorithm=second, out=tmp_path / "second", resume=tmp_path / "first"
    )
    assert (run.result["outcome"], run.result["version"]) == ("stopped", 120)


class KilledAfterAPush(AddUpRows):
    """Worker 1's first process dies once the server has applied its fifth gradient, before it has the answer."""

    def before_step(self, worker):
        if (worker.worker_id, worker._membership.incarnation, worker._replica.step) == (1, 0, 5):
            mock.patch.object(Client, "_hear", die).start()


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("algorithm", ["parameter-server(mode=async)", "downpour(apply=sgd)"])
def test_a_worker_dies_between_its_push_and_the_answer(algorithm):
    """The others go on, and its replacement gets all parameters anew."""
    run = pl.launch(KilledAfterAPush(0, epochs=4, learning_rate=1.0), workers=3, algorithm=algorithm, restarts=1)
    assert (run.result["outcome"], run.result["restarts"]) == ("stopped", 1)
    rows = np.concatenate(list(run.records.values()))
    assert len(set(rows["applied_version"])) == len(rows) == run.result["version"] - 1, "that gradient has no record"
