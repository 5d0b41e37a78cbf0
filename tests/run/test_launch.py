"""`launch`: what a run of a user's own loop returns, writes and resumes."""

import json
import threading

import numpy as np
import pytest
import torch
from torch import nn

import forked
import paceline as pl
from contracts.runs import run_function
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files

pytestmark = pytest.mark.usefixtures("nothing_left")


class Loop:
    """A user's training with momentum and a schedule; what each worker saw stays in `rates` (of threads)."""

    def __init__(self, epochs, batch_size=4):
        self.epochs = range(epochs) if isinstance(epochs, int) else epochs
        self.batch_size = batch_size
        self.rates = []

    def __call__(self):
        generator = torch.Generator().manual_seed(1)
        data = torch.utils.data.TensorDataset(
            torch.randn(60, 5, generator=generator), torch.randn(60, 1, generator=generator)
        )
        model = nn.Linear(5, 1)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.fill_(-0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        loader = torch.utils.data.DataLoader(data, batch_size=self.batch_size, shuffle=True)
        with pl.attach(model, optimizer) as worker:
            for _ in self.epochs:
                for x, y in worker.batches(loader):
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    worker.report(loss)
                    optimizer.step()
                    self.rates.append(optimizer.param_groups[0]["lr"])
                schedule.step()


def test_the_run_and_its_folder(tmp_path):
    run = pl.launch(Loop(2), workers=2, algorithm=pl.Locked(kind="rwlock"), out=tmp_path / "run", seed=5)
    assert run.result["outcome"] == "stopped"
    assert run.result["algorithm"] == "locked(kind=rwlock)"
    assert run.result["steps"] == run.result["version"] == 30
    assert run.result["samples"] == 120
    assert sum(run.result["updates_per_worker"]) == 30
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.json", "result.json", "report.html", "trace.json", "events-0.jsonl", "events-1.jsonl"} <= names
    assert json.loads((tmp_path / "run" / "result.json").read_text())["version"] == 30
    newest = checkpoint_files.newest(tmp_path / "run" / "checkpoint")
    assert checkpoint.load_parameters(newest).version == 30


@pytest.mark.parametrize(
    ("train", "goal", "says"),
    [
        (Loop(1), {"target_accuracy": 0.5}, "needs a way to evaluate the loop"),
        (bool, {}, "bool never called paceline.attach"),
        (Loop(1), {"algorithm": "diloco(fragments=99)"}, "write fragments=2 or less"),
    ],
)
def test_a_run_that_never_began_leaves_its_folder_as_it_was(train, goal, says, tmp_path):
    for folder in (tmp_path / "new", tmp_path):
        with pytest.raises(pl.UsageError, match=says):
            pl.launch(train, workers=2, backend="threads", out=folder, **{"algorithm": "hogwild"} | goal)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("algorithm", ["lockstep", "locked", "leashed", "hogwild"])
def test_one_worker_resumes_bit_for_bit_under_a_schedule(algorithm, tmp_path):
    settings = {"workers": 1, "algorithm": algorithm, "backend": "threads"}
    _, straight = run_function(Loop(4), **settings)
    pl.launch(Loop(2), out=tmp_path, **settings)
    resumed = Loop(4)
    run, parameters = run_function(resumed, resume=tmp_path, **settings)
    assert torch.equal(parameters.x, straight.x)
    assert parameters.version == straight.version == 60
    assert resumed.rates == [0.1 / 4] * 15 + [0.1 / 8] * 15
    assert sorted(run.records[0]["applied_version"]) == list(range(1, 61))


def test_lockstep_resumes_bit_for_bit(tmp_path):
    settings = {"workers": 2, "algorithm": "lockstep", "backend": "threads"}
    _, straight = run_function(Loop(4), **settings)
    pl.launch(Loop(2), out=tmp_path, **settings)
    _, parameters = run_function(Loop(4), resume=tmp_path, **settings)
    assert torch.equal(parameters.x, straight.x)


@pytest.mark.parametrize("algorithm", ["locked", "leashed", "lockstep"])
def test_counts_go_on_in_a_resumed_run(algorithm, tmp_path):
    settings = {"workers": 3, "algorithm": algorithm}
    pl.launch(Loop(2), out=tmp_path, **settings)
    run, parameters = run_function(Loop(4), resume=tmp_path, out=tmp_path, **settings)
    records = np.concatenate(list(run.records.values()))
    assert set(records["applied_version"].tolist()) == set(range(1, parameters.version + 1))
    assert run.result["samples"] == 4 * 60
    assert sorted(records["batch"][records["samples"] > 0]) == list(range(60))


def test_the_same_folder_may_be_named_in_two_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"workers": 2, "algorithm": "locked", "backend": "threads"}
    pl.launch(Loop(1), out="run", **settings)
    run = pl.launch(Loop(2), out=tmp_path / "run", resume="run", **settings)
    assert run.result["version"] == 30


def test_checkpoints_are_written_all_along(tmp_path):
    """Every epoch's, where that is asked for; at a distance in time, the later ones too. It ends when two were seen."""
    seen = set()
    loop = Loop(iter(lambda: len(seen) < 2, False))

    def look(progress):
        seen.update(int(path.parent.name) for path in tmp_path.glob("checkpoint/*/complete.json"))

    settings = {"backend": "threads", "checkpoint_every_s": 0.05, "on_progress": look}
    pl.launch(loop, workers=1, algorithm="locked", out=tmp_path, **settings)
    assert len(list(tmp_path.glob("checkpoint/*"))) == 1, "older ones are removed"


def test_launched_again_and_again_in_one_process():
    for workers in (1, 2, 3, 5):
        for backend in ("processes", "threads"):
            run = pl.launch(Loop(1), workers=workers, algorithm="leashed", backend=backend)
            assert run.result["steps"] == 15


def test_seeds_are_the_callers_own_and_the_order_is_launchs():
    one, two = (run_function(Loop(2), workers=1, algorithm="locked", seed=7)[1].x for _ in range(2))
    other = run_function(Loop(2), workers=1, algorithm="locked", seed=8)[1].x
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_more_workers_than_batches():
    run = pl.launch(Loop(2, batch_size=30), workers=5, algorithm="lockstep", backend="threads")
    assert run.result["steps"] == 2
    assert run.result["samples"] == 120


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_unresolved_exchanges_of_all_workers_are_in_the_result(num_epochs):
    """As many as each worker had counted by its end, the last exchange included; on a busy machine some are true ones."""

    def train():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer, algorithm="ad-psgd") as worker:
            counts = worker._membership.ports.counts
            for _ in range(num_epochs):
                for _ in worker.batches(list(range(6))):
                    model(torch.ones(1, 2)).sum().backward()
                    optimizer.step()
                counts.unresolved_exchanges += 1000

    assert pl.launch(train, workers=3, backend="threads").result["unresolved_exchanges"] // 1000 == 3 * num_epochs


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "local-sgd"])
def test_the_cause_is_named_and_not_what_follows_from_it(algorithm):
    """Worker 0, which misses worker 1 in their round, says so before worker 1 has told its error."""
    threads = {}
    both = threading.Barrier(2)

    def loop():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with pl.attach(model, optimizer) as worker:
                threads[worker.worker_id] = threading.current_thread()
                both.wait(forked.AGAINST_HANGS_S)
                for step, x in enumerate(worker.batches([torch.ones(1, 2)] * 32)):
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
                    if worker.worker_id == 1 and step == 5:
                        raise ArithmeticError("the cause")
        except ArithmeticError:
            threads[0].join()
            raise

    with pytest.raises(pl.PacelineError, match="Worker 1: ArithmeticError: the cause"):
        pl.launch(loop, workers=2, algorithm=algorithm, backend="threads")
