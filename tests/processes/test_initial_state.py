"""Worker processes begin with worker 0's state, and one that replaces a dead one with the run's."""

import json
import os
import signal
from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from leftovers import wait_until
from loops import unseeded


@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild"])
def test_processes_begin_with_worker_0s_model(algorithm, tmp_path):
    pl.launch(partial(unseeded.loop, tmp_path), workers=2, algorithm=algorithm)
    found = unseeded.begun(tmp_path)
    assert found.keys() == {"0-0", "1-0"}
    check(found)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_replaced_worker_begins_with_what_the_run_began_with(victim, tmp_path):
    run = pl.launch(
        partial(unseeded.loop, tmp_path, victim=victim),
        workers=2,
        algorithm="hogwild",
        restarts=1,
        out=tmp_path / "run",
    )
    assert run.result["restarts"] == 1
    found = unseeded.begun(tmp_path)
    assert f"{victim}-1" in found
    check(found)
    first = found["0-0"][0]["features.weight"]
    assert run.evaluations[-1]["test_loss"] == pytest.approx(sum(first).real, rel=1e-4), "so does who evaluates"


def taught(folder):
    """Worker 0 changes its frozen parameter; then worker 1 is killed, and worker 0 waits until its replacement has looked."""
    model = nn.Linear(3, 1)
    model.teacher = nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=1e-4)
    with pl.attach(model, optimizer) as worker:
        if worker.worker_id and (folder / "dead").exists():
            (folder / "found").write_text(json.dumps(model.teacher.tolist()))
        for x in worker.batches(torch.ones(8, 2, 3)):
            if not worker.worker_id:
                model.teacher.data.fill_(7.0)
                (folder / "taught").touch()
                wait_until((folder / "found").exists, "the replacement")
            elif not (folder / "dead").exists():
                wait_until((folder / "taught").exists, "the teacher")
                (folder / "dead").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def test_a_replacement_has_a_neighbours_frozen_parameters(tmp_path):
    run = pl.launch(partial(taught, tmp_path), workers=2, algorithm="ad-psgd", restarts=1)
    assert run.result["restarts"] == 1
    assert json.loads((tmp_path / "found").read_text()) == [7.0, 7.0]


def check(found):
    first, _ = found["0-0"]
    for name, (own, begun) in found.items():
        assert name == "0-0" or own["features.weight"] != first["features.weight"]
        assert begun == {what: value for what, value in first.items() if what in begun}, name
