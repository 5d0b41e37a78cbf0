"""A run that is stopped at any instant leaves a complete checkpoint of its last step, from which it can be resumed."""

import contextlib
import os
import random
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import leftovers
import paceline as pl
import soak_results
from contracts.table import rows
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from paceline.run import supervisor
from paceline.system import interrupts

pytestmark = pytest.mark.usefixtures("nothing_left")

BATCHES, EPOCHS = 30, 2


def train(stopped=None, process=0, drops=False):
    """A user's loop, in which the worker that gets sample `stopped` sends the process a SIGTERM."""
    draw = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        torch.randn(4 * BATCHES, 6, generator=draw),
        torch.randn(4 * BATCHES, 2, generator=draw),
        torch.arange(4 * BATCHES),
    )
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if drops else 0.5)
    with pl.attach(model, optimizer) as worker:
        for epoch in range(EPOCHS):
            for x, y, samples in worker.batches(loader):
                if not epoch and stopped in samples.tolist():
                    os.kill(process, signal.SIGTERM)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()


def stop_one(row, folder, draws, backend="threads"):
    """Stops a run somewhere in its first epoch and resumes it; returns the parameters at the end.

    One worker, drawn at random, may be slow, so that workers with models of their own are several steps apart.
    """
    workers = row.most(3)
    settings = {"algorithm": row.spec, "workers": workers, "backend": backend}
    resumed = partial(train, drops=bool(row.drops_updates))
    settings |= {"slow": {draws.randrange(workers): draws.choice([1.0, 3.0, 20.0])}}
    with terminated():
        pl.launch(partial(resumed, draws.randrange(4 * BATCHES), os.getpid()), out=folder, **settings)
    stopped = pl.RunData.load(folder, decided=False)
    check_last(row, stopped, checkpoint_files.newest(folder / "checkpoint"))
    check_whole(row, pl.launch(resumed, resume=folder, **settings))
    return last_of(folder)


@contextlib.contextmanager
def terminated():
    """Handles signals as the command line does, and expects a SIGTERM."""
    interrupts.install()
    try:
        with pytest.raises(interrupts.Terminated):
            yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def last_of(folder):
    """The parameters of the newest checkpoint."""
    return checkpoint.load_parameters(checkpoint_files.newest(folder / "checkpoint"))


def check_last(row, run, newest):
    """The checkpoint is of the run's last step, on all workers."""
    assert run.result["outcome"] == "stopped"
    assert run.result["outcome_reason"] == "Interrupted by SIGTERM."
    parts = checkpoint.load_workers(newest)
    assert len(parts) == len(run.records)
    if row.algorithm.lockstep:
        assert {one["taken"] for one in parts} == {len(rows) for rows in run.records.values()}
    assert checkpoint.load_parameters(newest).version == run.result["version"]


def check_whole(row, run):
    """Every batch has been trained on once."""
    assert run.result["outcome"] == "stopped"
    assert run.result["records_lost"] == run.result["batches_missed"] == run.result["batches_repeated"] == 0
    records = np.concatenate(list(run.records.values()))
    assert records["samples"].sum() == EPOCHS * BATCHES * 4
    if not row.follows_times:
        assert sorted(records["batch"][records["samples"] > 0].tolist()) == list(range(EPOCHS * BATCHES))


@pytest.mark.filterwarnings("ignore:The one-peer exponential graph")
@rows(lambda row: not row.policy)
def test_a_stop_in_the_first_epoch(row, tmp_path):
    """In lockstep the resumed run is bit for bit that without a stop. `make soak` stops processes, of all rows."""
    resumed = stop_one(row, tmp_path / "run", random.Random(f"stop {row.spec}"))
    if row.algorithm.lockstep and not row.follows_times:
        pl.launch(train, workers=row.most(3), backend="threads", algorithm=row.spec, out=tmp_path / "straight")
        assert torch.equal(resumed.x, last_of(tmp_path / "straight").x)


def train_and_hang(process, waits):
    """Worker 1 sends the process a SIGTERM at its fourth batch and then does not answer.

    If worker 0 `waits`, it does so at its own fourth batch: otherwise it might take all batches before worker 1 begins.
    """
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.attach(model, optimizer) as worker:
        for number, x in enumerate(worker.batches(torch.utils.data.DataLoader(torch.ones(4 * BATCHES, 2)))):
            if worker.worker_id == 1 and number == 3:
                os.kill(process, signal.SIGTERM)
                time.sleep(1000)
            if waits and worker.worker_id == 0 and number == 3:
                leftovers.wait_until(worker._membership.stopped, "the run's end")
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild"])
def test_a_worker_that_hangs_is_killed_and_the_result_says_what_is_missing(algorithm, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "_LAST_ROUND_S", 0.5)
    monkeypatch.setattr(supervisor, "_INTERRUPTED_GRACE_S", 1.0)
    with terminated():
        loop = partial(train_and_hang, os.getpid(), algorithm == "hogwild")
        pl.launch(loop, workers=2, algorithm=algorithm, out=tmp_path)
    run = pl.RunData.load(tmp_path)
    assert run.result["outcome"] == "stopped"
    assert any("The last step has no checkpoint" in note for note in run.result["notes"])


@pytest.mark.soak
@rows()
def test_two_stops_of_processes(row, tmp_path):
    """Writes the number of stops to PACELINE_SOAK_RESULTS."""
    for number in range(2):
        stop_one(row, tmp_path / str(number), random.Random(f"stop {row.spec} {number}"), backend="processes")
    soak_results.keep("soak_stops", row.spec, {"SIGTERMs": 2, "complete checkpoints": 2, "resumed to the end": 2})
