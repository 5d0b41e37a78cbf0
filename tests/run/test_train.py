"""`train`: what a run returns and writes, on either backend; the contracts go further."""

import json
from unittest import mock

import numpy as np
import pytest

import paceline as pl
from contracts.linear_task import LINEAR
from contracts.runs import run_task
from contracts.table import ROWS, rows
from paceline.run.config import TrainConfig
from paceline.run.train import prepared

pytestmark = pytest.mark.usefixtures("nothing_left")


@rows(lambda row: row.is_default)
def test_threads_train_as_well(row):
    """A convex loss falls whatever the order of the updates, of which half may be dropped.

    Each family: what its variants learn on processes is looked at in `contracts/test_counts.py`.
    """
    workers = row.most(2)
    # Not by epochs, whose batches one worker may take before the other begins: an update of ringleader is of all workers.
    steps = 3 * 180 // workers
    run, parameters = run_task(row, task=LINEAR, workers=workers, backend="threads", steps=steps)
    assert run.result["outcome"] == "stopped"
    assert run.result["version"] == parameters.version
    assert run.result["samples"] + 8 * run.result["dropped_updates"] >= 3 * 1437
    assert row.rate_follows_times or run.result["test_loss"] < 0.75 * run.result["initial_loss"]


def test_the_run_and_its_folder(tmp_path):
    seen = []
    config = TrainConfig(algorithm="locked", workers=2, epochs=3)
    run = pl.train(config, out=tmp_path / "run", command="paceline train", on_progress=seen.append)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "checkpoint", "config.json", "evaluations.json", "events-0.jsonl", "events-1.jsonl", "report.html", "result.json",
        "trace.json",
    }  # fmt: skip
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for key in (
        "task", "algorithm", "workers", "backend", "seed", "steps", "samples", "wall_s", "samples_per_s", "train_loss",
        "test_accuracy", "time_to_target_s", "steps_to_target", "time_to_fraction_s", "staleness", "updates_per_worker",
        "waiting_share", "failed_publishes", "dropped_updates", "outcome", "workers_lost",
    ):  # fmt: skip
        assert key in result
    assert result["staleness"].keys() == {"mean", "p50", "p95", "max", "histogram", "mean_after_gradient"}
    again = pl.RunData.load(tmp_path / "run")
    assert all(np.array_equal(again.records[worker], run.records[worker]) for worker in (0, 1))
    assert seen[-1].version <= 540
    assert run.result["initial_loss"] == pytest.approx(2.3, abs=0.1)


def test_a_share_of_the_initial_loss_and_a_number_of_seconds_end_a_run():
    half = pl.train(TrainConfig(backend="threads", target_fraction=0.5, epochs=1e6, batch_size=32))
    assert half.result["outcome"] == "converged"
    assert half.result["target_loss"] == 0.5 * half.result["initial_loss"]
    assert half.result["train_loss"] < 0.6 * half.result["initial_loss"]
    short = pl.train(TrainConfig(backend="threads", limit_s=0.1, epochs=1e6))
    assert short.result["outcome"] == "stopped"
    # Until the last step's end: a busy machine may begin no other before the limit.
    assert short.result["wall_s"] >= 0.05


def test_ctrl_c_while_a_worker_is_being_started_is_not_hidden():
    with (
        mock.patch("multiprocessing.context.ForkServerProcess._Popen", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        pl.train(TrainConfig(workers=2, epochs=1))


def test_steps_are_each_workers_own():
    for algorithm in ("locked", "leashed", "lockstep"):
        run = pl.train(TrainConfig(algorithm=algorithm, workers=3, steps=25))
        assert [len(records) for records in run.records.values()] == [25, 25, 25]


def test_fractions_of_an_epoch():
    assert pl.train(TrainConfig(algorithm="locked", workers=2, epochs=0.5, backend="threads")).result["steps"] == 90


@pytest.mark.parametrize("partition", ["fixed", "skewed(alpha=0.3)"])
@pytest.mark.parametrize("algorithm", ["locked", "lockstep"])
def test_own_parts_of_the_data(partition, algorithm):
    run = pl.train(TrainConfig(algorithm=algorithm, workers=3, epochs=2, partition=partition))
    assert run.result["samples"] == 2 * 1437
    batches = [set(records["batch"][records["samples"] > 0].tolist()) for records in run.records.values()]
    assert not batches[0] & batches[1]
    assert len(set.union(*batches)) == sum(map(len, batches))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "sequential", "workers": 2}, "1 worker, not 2"),
        ({"algorithm": "lockstep", "optimizer_state": "shared"}, "a separate optimizer on every worker"),
        ({"algorithm": "leashed(persistance=1)"}, "persistence"),
        ({"algorithm": "hogwild", "optimizer": "adagrad", "optimizer_state": "shared"}, "cannot share its state"),
        ({"optimizer": "lbfgs"}, "several times per step"),
        ({"task": "digits"}, "digits-mlp"),
        ({"backend": "mpi"}, "processes or threads"),
        ({"partition": "diagonal"}, "dynamic"),
    ],
)
def test_what_cannot_be_trained(settings, message, tmp_path):
    with pytest.raises(pl.UsageError, match=message) as raised:
        pl.train(TrainConfig(**{"workers": 2, "epochs": 1, **settings}))
    raised.value.__traceback__ = None


def test_what_only_workers_can_refuse_leaves_no_folder(tmp_path):
    """They know the model's tensors; corrected, the command has the same folder to write into."""
    config = {"task": "digits-mlp", "workers": 2, "epochs": 0.1, "backend": "threads"}
    with pytest.raises(pl.UsageError, match="write fragments=6 or less"):
        pl.train(TrainConfig(algorithm="diloco(fragments=99)", **config), out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    assert pl.train(TrainConfig(algorithm="diloco(fragments=6)", **config), out=tmp_path / "run").result["steps"]


TASK = """
import torch
from torch import nn
from torch.utils.data import Dataset

from paceline import Task


class Line(Dataset):
    def __init__(self):
        self.noise = torch.randn(40, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.tensor([index / 40.0])
        return x, 3 * x + 1 + 0.01 * self.noise[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x):
        return self.layer(x)


def line():
    return Task(
        name="line", model=Net, datasets=lambda data: (Line(), Line()), loss=nn.functional.mse_loss, accuracy=None,
        batch_size=4, learning_rate=0.05, epochs=20,
    )
"""


@rows(lambda row: row.is_default)
def test_a_task_of_the_users_own(row, tmp_path):
    """Samples one by one, tensors inside the data set, buffers, a loss without an accuracy."""
    file = tmp_path / "my_task.py"
    file.write_text(TASK)
    given = {"task": f"{file}:line", "algorithm": row.spec, "workers": row.most(2)}
    if row.algorithm.default_learning_rate is not None:  # AdaGrad's own is meant for longer trainings than this
        given["learning_rate"] = 0.3
    run = pl.train(TrainConfig(**given), out=tmp_path / "run")
    assert run.result["outcome"] == "stopped"
    assert run.result["test_accuracy"] is None
    assert run.result["test_loss"] < 1.5
    resumed = pl.train(TrainConfig(**given, epochs=25, backend="threads"), resume=tmp_path / "run")
    assert resumed.result["test_loss"] < 1.5
    assert resumed.result["samples"] == 25 * 40


SUBCLASS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Task


class Doubled(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, 2 * y


def doubled():
    data = Doubled(torch.ones(40, 1), torch.ones(40, 1))
    return Task(
        name="doubled", model=lambda: nn.Linear(1, 1), datasets=lambda folder: (data, data), loss=nn.functional.mse_loss,
        accuracy=None, batch_size=4, learning_rate=0.1, epochs=20,
    )
"""


def test_a_data_set_that_extends_tensor_dataset_is_asked_for_its_samples(tmp_path):
    file = tmp_path / "doubled.py"
    file.write_text(SUBCLASS)
    run, parameters = run_task(ROWS[0], task=f"{file}:doubled", backend="processes")
    assert run.result["test_loss"] < 1e-6
    assert parameters.x.sum() == pytest.approx(2.0, abs=1e-3)


def test_a_worker_that_has_ended_is_not_shown_as_lost():
    seen = []
    config = TrainConfig(algorithm="hogwild", workers=2, steps=5)
    prepared(config, on_progress=seen.append, progress_every_s=0.0).run()  # look at every look of the supervisor's own
    assert [worker.alive for worker in seen[-1].workers] == [True, True]
