"""Replays of resumed runs, from the checkpoint with which they were resumed."""

import shutil

import pytest
import torch

import paceline as pl
from chosen import each_value
from run.replay_task import rewrite, trained, write_task

METHODS = [
    "locked", "leashed", "parameter-server(mode=async)", "parameter-server(mode=async,shards=2,codec=qsgd)",
    "parameter-server(mode=bounded(clock_bound=1))", "parameter-server(mode=sync(backups=1),shards=2)",
    "adaptive-revision(shards=2)", "downpour(push=2,fetch=2)", "downpour(overlap=true)", "lockstep", "all-reduce",
    "all-reduce(codec=sign)", "all-reduce(sharded=true)", "local-sgd(period=4)", "da-sgd",
    "diloco(period=4,outer=nesterov)", "d-psgd", "ad-psgd",
]  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def go_on(folder, task, algorithm, epochs, out=None, **named):
    config = {"workers": 3, "backend": "threads", "momentum": 0.9, **named}
    pl.train(pl.TrainConfig(task=task, algorithm=algorithm, epochs=epochs, **config), resume=folder, out=out)
    return pl.RecordedRun(out or folder)


def begin(folder, task, algorithm, **named):
    return trained(folder, task, algorithm, epochs=1, **named)


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_resumed_run_is_replayed_from_its_checkpoint(tmp_path, task, algorithm):
    named = {"momentum": None if algorithm.startswith(("adaptive", "downpour")) else 0.9}
    folder = begin(tmp_path / "run", task, algorithm, **named)
    recorded = go_on(folder, task, algorithm, 2.5, **named)
    run = pl.RunData.load(folder)
    assert run.result["replayable"], run.result["replayable_reason"]
    replayed = recorded.replay()
    before = sum(run.result["resumed"]["events"].values())
    assert replayed.steps == sum(map(len, run.records.values())) - before > 0
    assert replayed.checkpoint is not None


@pytest.mark.parametrize(
    ("how", "algorithm"),
    each_value(
        [
            ({"workers": 2}, {"workers": 3}),
            ({"workers": 4}, {"workers": 2}),
            ({"workers": 1}, {"workers": 2}),
            ({"optimizer": "adamw", "momentum": None}, {}),
            ({"momentum": 0.5}, {"momentum": 0.8, "learning_rate": 0.01}),
        ],
        ["locked", "all-reduce", "parameter-server(mode=async)"],
    ),
    ids=str,
)
def test_a_run_that_goes_on_otherwise_is_replayed(tmp_path, task, algorithm, how):
    named, then = how
    folder = begin(tmp_path / "run", task, algorithm, **named)
    assert go_on(folder, task, algorithm, 2, **{**named, **then}).replay().checkpoint is not None


@pytest.mark.parametrize("algorithm", ["leashed", "lockstep"])
def test_parts_of_the_data_are_replayed(tmp_path, task, algorithm):
    folder = begin(tmp_path / "run", task, algorithm, partition="fixed")
    assert go_on(folder, task, algorithm, 2, partition="fixed").replay().checkpoint is not None


def test_another_algorithm_and_a_second_resumption_are_replayed(tmp_path, task):
    folder = begin(tmp_path / "run", task, "locked")
    assert go_on(folder, task, "leashed", 2).replay().updates == 30
    third = go_on(folder, task, "parameter-server(mode=async)", 3)
    assert third.replay().steps == 30


def test_updates_since_the_checkpoint_are_shown(tmp_path, task):
    folder = begin(tmp_path / "run", task, "locked")
    recorded = go_on(folder, task, "locked", 2)
    (step,) = recorded.at(31).steps
    assert step["read_version"] == 30
    last = flat(recorded.at(60).model)
    assert recorded.first(lambda model: not torch.equal(flat(model), last) or True).version == 31
    assert recorded.first(lambda model: torch.equal(flat(model), last)).version == 60
    with pytest.raises(pl.UsageError, match="has updates 31 to 60, not 30"):
        recorded.at(30)


def test_an_update_of_a_workers_own_model_is_shown(tmp_path, task):
    recorded = go_on(begin(tmp_path / "run", task, "ad-psgd"), task, "ad-psgd", 2)
    assert (recorded.first_update, recorded.updates) == (31, 60)
    for number in (31, 45, 60):
        (step,) = recorded.at(number).steps
        assert step["gradient"].norm() > 0


def flat(model):
    return torch.cat([one.detach().flatten().clone() for one in model.parameters()])


def test_a_run_in_another_folder_needs_the_first_ones_checkpoint(tmp_path, task):
    folder = begin(tmp_path / "run", task, "locked")
    assert go_on(folder, task, "locked", 2, out=tmp_path / "other").replay().checkpoint is not None
    shutil.rmtree(folder / "checkpoint")
    with pytest.raises(pl.UsageError, match="from which the run was resumed, is gone"):
        pl.RecordedRun(tmp_path / "other")


def forget_resumption(run):
    del run.result["resumed"]


@pytest.mark.parametrize(
    "found", [5, {}, {"checkpoint": "checkpoint/30", "events": 3, "version": 30, "versions": {}}, None]
)
def test_a_damaged_beginning_is_named(tmp_path, task, found):
    folder = begin(tmp_path / "run", task, "locked")
    go_on(folder, task, "locked", 2)
    with pytest.raises(pl.UsageError, match="is damaged: its resumed is"):
        pl.RecordedRun(rewrite(folder, lambda run: run.result.update(resumed=found)))


def drop(run):
    run.records[1] = run.records[1][:-1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (forget_resumption, "lacks records of steps"),
        (drop, r"lacks records of steps|update \d+ has no record"),
    ],
)
def test_what_records_do_not_have_is_refused(tmp_path, task, change, why):
    folder = begin(tmp_path / "run", task, "locked")
    go_on(folder, task, "locked", 2)
    with pytest.raises(pl.UsageError, match=why):
        pl.RecordedRun(rewrite(folder, change))
