"""Rows looked up at servers by real processes: whichever process dies during a lookup, each row has each update once."""

import os
import signal
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from contracts.programs import BATCH_SIZE, planted
from paceline.algorithms.server.client import Client
from paceline.loop.looked_up_tables import LookedUpTable
from paceline.membership.environment import current_environment
from paceline.system.pages import give_back_freed
from processes.shards import check_losses, check_versions, run_and_kill_shards
from processes.test_sparse_servers import ROWS, WIDTH, AddUpRows, expected, table_of
from system.test_pages import resident_bytes


class LookUpRows(AddUpRows):
    """Adds each value of a batch to all of one row; rows only ever grow in this direction, and so must what is looked up."""

    loses = False

    def __call__(self):
        with mock.patch("paceline.loop.looked_up_tables.LEAST_BYTES", 0):
            self.train()

    def train(self):
        model = nn.Embedding(ROWS, WIDTH, sparse=True)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = torch.utils.data.TensorDataset(torch.tensor(planted(self.num_batches), dtype=torch.float32))
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
        last = torch.zeros(ROWS, WIDTH)
        with pl.attach(model, optimizer) as worker:
            for _ in range(self.epochs):
                for (values,) in worker.batches(loader):
                    assert type(model.weight) is LookedUpTable
                    self.before_lookup(worker)
                    optimizer.zero_grad()
                    rows = values.long() % ROWS
                    found = model(rows)
                    (-found * values.unsqueeze(1)).sum().backward()
                    grown = (found.detach() - last[rows]) * values.unsqueeze(1)
                    assert self.loses or (grown >= 0).all(), "an older row"
                    last[rows] = found.detach()
                    optimizer.step()

    def before_lookup(self, worker):
        """Nothing."""


class LosingRows(LookUpRows):
    """A snapshot may lack the last updates."""

    loses = True


def test_both_shards_are_killed_and_their_copies_take_over():
    algorithm = pl.ParameterServer(mode=pl.Async(), durability="replica", shards=2)
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(0, 50), (1, 150)], program=LookUpRows)
    assert table_of(parameters) == expected(check_versions(run, parameters, restarts=2))


def test_a_shard_without_a_copy_is_killed():
    algorithm = pl.ParameterServer(mode=pl.Async(), snapshot_s=0.05)
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(0, 120), (0, 400)], program=LosingRows)
    assert table_of(parameters) == expected(check_losses(run, restarts=2))


class KilledInALookup(LookUpRows):
    """Worker 1's first process dies once it has asked for rows in its fifth step."""

    def before_lookup(self, worker):
        if (worker.worker_id, worker._membership.incarnation, worker._replica.step) == (1, 0, 5):
            mock.patch.object(Client, "_wait", die).start()


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_dies_in_the_middle_of_a_lookup():
    run = pl.launch(
        KilledInALookup(0, epochs=4), workers=3, algorithm="parameter-server(mode=async, shards=2)", restarts=1
    )
    assert (run.result["outcome"], run.result["restarts"]) == ("stopped", 1)
    rows = np.concatenate(list(run.records.values()))
    assert len(set(rows["applied_version"])) == len(rows) == run.result["version"]


def test_a_run_is_resumed_and_checkpoints_have_whole_tables(tmp_path):
    """By a second run with other shards; the first one's weights are what its records say."""
    first = pl.ParameterServer(mode=pl.Async(), shards=2)
    run = pl.launch(LookUpRows(0, epochs=2), workers=2, algorithm=first, out=tmp_path / "first")
    assert run.result["outcome"] == "stopped"
    again = pl.launch(
        LosingRows(0, epochs=3), workers=3, algorithm=pl.ParameterServer(mode=pl.Async(), shards=3),
        out=tmp_path / "second", resume=tmp_path / "first",
    )  # fmt: skip
    assert again.result["version"] == run.result["version"] * 3 / 2


class WithItsResult(LookUpRows):
    """Every worker compares its model with what it must be after the run, and leaves a file."""

    def train(self):
        torch.manual_seed(os.getpid())
        model = nn.Embedding(ROWS, WIDTH, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pl.attach(model, optimizer) as worker:
            first = worker.sum(model(torch.arange(ROWS)).detach())
            for rows in worker.batches([torch.tensor([n]) for n in range(20)]):
                optimizer.zero_grad()
                (-model(rows)).sum().backward()
                optimizer.step()
        expected = first / worker.num_workers
        expected[:20] += 1.0
        torch.testing.assert_close(model.weight.detach(), expected)
        (self.meeting / str(worker.worker_id)).touch()


@pytest.mark.parametrize("algorithm", ["parameter-server(mode=async, shards=2)", "downpour(apply=sgd)"])
def test_all_workers_begin_with_worker_0s_table_and_end_with_all_of_it(algorithm, tmp_path):
    run = pl.launch(WithItsResult(0, meeting=tmp_path), workers=2, algorithm=algorithm)
    assert run.result["outcome"] == "stopped"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["0", "1"]


class Large(LookUpRows):
    """A table of 128 MB, which worker 1 makes without touching memory; it notes by how much its memory has grown."""

    def __call__(self):
        rows = 1 << 21
        give_back_freed()
        before = resident_bytes()
        make = nn.Embedding if not worker_is_second() else partial(torch.nn.utils.skip_init, nn.Embedding)
        model = make(rows, 16, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        draw = torch.Generator().manual_seed(0)
        with pl.attach(model, optimizer) as worker:
            grown = []
            for batch in worker.batches([torch.randint(0, rows, (256,), generator=draw) for _ in range(60)]):
                optimizer.zero_grad()
                model(batch).square().sum().backward()
                optimizer.step()
                grown.append(resident_bytes() - before)
            if worker.worker_id:
                (self.meeting / "grown").write_text(str(max(grown) / model.weight.nbytes))


def worker_is_second():
    return current_environment().worker_id == 1


def test_a_workers_memory_is_below_a_tenth_of_the_table(tmp_path):
    pl.launch(Large(0, meeting=tmp_path), workers=2, algorithm="parameter-server(mode=async)")
    assert float((tmp_path / "grown").read_text()) < 0.1
