"""Real workers whose batches are as large as they are fast."""

import json
import statistics

import numpy as np
import pytest
import torch

import forked
import paceline as pl
from contracts.linear_task import LINEAR
from free_ports import free_port
from processes import share_programs
from processes.share_programs import BATCH_SIZE, SAMPLES, Loop, reference
from processes.test_torchrun import ended

ROUNDS = SAMPLES // (2 * BATCH_SIZE)  # of two workers in an epoch


def told(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]


def check(found, epochs, workers=2):
    """Each sample once per epoch, and the updates of equal batches."""
    for epoch in range(epochs):
        assert sorted(index for one in found for index in one["seen"][epoch]) == list(range(SAMPLES))
    for one in found:
        assert one["x"] == found[0]["x"]
        torch.testing.assert_close(torch.tensor(one["x"]), reference(epochs, workers), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["lockstep(shares=auto)", "all-reduce(shares=auto)"])
@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_slow_worker_of_launch_gets_less_also_where_its_loader_fetches_ahead(algorithm, num_processes, tmp_path):
    run = pl.launch(Loop(tmp_path, num_processes=num_processes), workers=2, algorithm=algorithm)
    found = told(tmp_path)
    check(found, epochs=2)
    changes = run.result["batch_sizes"]
    assert changes[0]["sizes"] == [8, 8]
    assert {sum(one["sizes"]) for one in changes} == {16}
    typical = statistics.median(found[0]["sizes"][ROUNDS:])  # of the second epoch: one measurement may be disturbed
    assert 2 <= typical <= 6, "a third of the other's, or as near as a busy machine measures it"
    assert found[0]["sizes"] == run.records[0]["samples"].tolist()


def test_a_worker_that_is_slow_for_a_while_gets_less_and_then_its_share_back(tmp_path):
    """How soon depends on what else the machine does; tests/run/test_shares.py has that on a virtual clock."""
    slow = Loop(tmp_path, epochs=4, slow_from=30, slow_until=65)
    pl.launch(slow, workers=2, algorithm="all-reduce(shares=auto)")
    sizes = told(tmp_path)[0]["sizes"]
    assert min(sizes[30:65]) <= 6
    assert max(sizes[65:]) > min(sizes[30:65])


def test_under_torchruns_variables(tmp_path):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    common |= {"SHARES_FOLDER": str(tmp_path), "PACELINE_ALGORITHM": "all-reduce(shares=auto)"}
    with forked.running([share_programs.__file__], [common | {"RANK": str(rank)} for rank in range(2)]) as workers:
        for worker in workers:
            code, _, errors = ended(worker)
            assert code == 0, errors
    found = told(tmp_path)
    check(found, epochs=2)
    assert min(found[0]["sizes"]) <= 6


@pytest.mark.parametrize("algorithm", ["lockstep(shares=auto)", "all-reduce(shares=auto, sharded=true)"])
def test_a_resumed_task_goes_on_where_it_was(algorithm, tmp_path):
    def trained(epochs, **where):
        settings = {"workers": 2, "epochs": epochs, "seed": 2, "slow": {0: 3.0}}
        config = pl.TrainConfig(task=LINEAR, algorithm=algorithm, **settings)  # whose rounding errors do not grow
        return pl.train(config, **where)

    straight = trained(4, out=tmp_path / "straight")
    trained(2, out=tmp_path / "parts")
    parts = trained(4, resume=tmp_path / "parts")
    assert parts.result["samples"] == straight.result["samples"] == 4 * 1437
    assert parts.result["version"] == straight.result["version"]
    assert parts.result["batches_repeated"] == parts.result["batches_missed"] == 0
    assert parts.result["test_loss"] == pytest.approx(straight.result["test_loss"], rel=1e-4)
    sizes = parts.records[0]["samples"]
    assert np.median(sizes[len(sizes) // 2 :]) < 8, "of the second part; one measurement may be disturbed"
