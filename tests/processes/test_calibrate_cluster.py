"""`paceline calibrate` in several workers: one is slow on purpose, one dies, one does not come."""

import json
import re

import pytest

import forked
from free_ports import free_port
from paceline.simulator import Cluster
from processes.test_torchrun import ended

TASK = """
import os, signal, time
import torch
from torch import nn
import paceline as pl


class Slowed(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.steps = nn.Linear(2000, 10), 0

    def forward(self, x):
        self.steps += 1
        time.sleep(float(os.environ["STEP_S"]))
        if self.steps == int(os.environ.get("DIES_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.model(x)


def data(folder):
    x, y = torch.randn(64, 2000), torch.randint(0, 10, (64,))
    return torch.utils.data.TensorDataset(x, y), torch.utils.data.TensorDataset(x, y)


def task():
    return pl.Task(name="slowed", model=Slowed, datasets=data, batch_size=4)
"""


@pytest.fixture
def calibrate(tmp_path):
    """(code, output, errors) of each worker; the cluster file is `out/cluster.toml`."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "out").mkdir()

    def run(*environments, of=3, options=()):
        words = ["-m", "paceline", "calibrate", "--quick", "--json", "--task", f"{tmp_path / 'task.py'}:task"]
        words += ["--out", str(tmp_path / "out" / "cluster.toml"), *options]
        port = str(free_port())
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(of), "OMP_NUM_THREADS": "1"}
        given = [
            {**common, "RANK": str(rank), "STEP_S": "0.05", **environment}
            for rank, environment in enumerate(environments)
        ]
        with forked.running(words, given) as started:
            return [ended(one) for one in started]

    return run


def test_a_worker_that_was_slowed_is_slow_in_the_file(calibrate, tmp_path):
    found = calibrate({}, {}, {"STEP_S": "0.2"})
    assert [code for code, *_ in found] == [0, 0, 0], found
    assert [(output, errors) for _, output, errors in found[1:]] == [("", "")] * 2, "worker 0 talks"
    cluster = Cluster.load(tmp_path / "out" / "cluster.toml")
    assert cluster.workers == 3
    factors = dict(cluster.slowness)
    assert 2 < factors.pop(2) < 5
    assert all(0.5 < factor < 1.7 for factor in factors.values()), "a busy machine may make others a little slow"
    measured = json.loads(found[0][1].splitlines()[-1])["workers"]
    medians_s = [one["measured"]["step without update, batch 4"]["median_s"] for one in measured]
    assert sorted(medians_s)[1] / 1.3 < cluster.compute.mean_s < 3 * sorted(medians_s)[1], "the median worker's"
    told = json.loads(found[0][1].splitlines()[-1])
    assert told["cluster"]["slow"]["2"] == dict(cluster.slowness)[2]
    assert sorted(link["workers"] for link in told["links"]) == [[0, 1], [0, 2], [1, 2]]
    assert [one["machine"] for one in told["workers"]] == [0, 0, 0]
    assert ["copy of the parameters" in one["measured"] for one in told["workers"]] == [True, False, False]
    text = (tmp_path / "out" / "cluster.toml").read_text()
    assert re.search(r"^# worker 2: its steps take \d\.\d\d times the median worker's$", text, re.MULTILINE)
    assert "Links: 3 of 3 pairs" in text
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["cluster.toml"]


def test_a_worker_that_dies_is_named_by_all_and_nothing_is_written(calibrate, tmp_path):
    found = calibrate({}, {}, {"DIES_AT": "10"})
    assert [code for code, *_ in found] == [1, 1, -9], found
    for _, output, errors in found[:2]:
        assert output == ""
        assert "While measuring steps: worker 2 left (its connection broke" in errors
        assert "start all workers again" in errors
        assert "Traceback" not in errors
    assert list((tmp_path / "out").iterdir()) == []


def test_a_worker_that_does_not_come_is_named_within_the_deadline(calibrate, tmp_path):
    found = calibrate(*[{"PACELINE_DEADLINE_S": "15"}] * 2)
    assert [code for code, *_ in found] == [1, 1], found
    for _, _, errors in found:
        assert errors.count("worker 2 did not arrive within 15 s") == 1
        assert "Traceback" not in errors
    assert list((tmp_path / "out").iterdir()) == []


def test_what_worker_0_refuses_ends_all(calibrate, tmp_path):
    (tmp_path / "out" / "cluster.toml").write_text("workers = 3\n")
    found = calibrate({}, {}, of=2)
    assert [code for code, *_ in found] == [2, 2], found
    assert all("exists; add --force to replace it" in errors for _, _, errors in found)
    assert (tmp_path / "out" / "cluster.toml").read_text() == "workers = 3\n"
