"""A run that is resumed goes on where its checkpoint was."""

import threading

import numpy as np
import pytest
import torch

import paceline as pl
from contracts.linear_task import LINEAR
from contracts.runs import plain_run, run_task
from contracts.table import ROWS, Row, backends, rows
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from rewritten import rewrite, rewrite_json

ADAMW = {"optimizer": "adamw", "learning_rate": 0.002}
MOMENTUM = {"optimizer": "sgd(weight_decay=0.001)", "momentum": 0.9, "learning_rate": 0.05}
UNEVEN, BATCHES = {"batch_size": 17}, 85  # in an epoch: three workers divide neither these nor the run's
FEW = {"batch_size": 59}  # 25 in an epoch


def train_in_two_parts(row, folder, *, first=1, epochs=2, **settings):
    """So many epochs, and then as many in all: both parts end where an epoch does. The first part, the run, parameters."""
    part, _ = run_task(row, out=folder, epochs=first, **settings)
    return part, *run_task(row, resume=folder, out=folder, epochs=epochs, **settings)


@rows(lambda row: row.is_default)
def test_one_worker_goes_on_bit_for_bit(row, tmp_path):
    check_one_worker(row, ADAMW, tmp_path)


@rows(lambda row: row.spec in ("sequential", "lockstep", "hogwild", "parameter-server"))
def test_one_worker_goes_on_with_its_momentum(row, tmp_path):
    """For each place that may hold the optimizer's state: what AdamW has beside it, a step's number, is not there."""
    check_one_worker(row, MOMENTUM, tmp_path)


def check_one_worker(row, optimizer, tmp_path):
    settings = {"batch_size": 127, **optimizer}
    _, straight = run_task(row, epochs=2, **settings)
    _, resumed, parameters = train_in_two_parts(row, tmp_path, **settings)
    assert resumed.result["outcome"] == "stopped"
    assert torch.equal(parameters.x, straight.x)
    assert parameters.version == straight.version == 2 * 12


@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.soak), 3]
)  # two divide an epoch: the easier case
@backends(lambda row: row.algorithm.lockstep and not row.policy)
def test_lockstep_goes_on_bit_for_bit(row, backend, workers, tmp_path):
    settings = {"workers": workers, "backend": backend, **ADAMW, **FEW}
    _, straight = run_task(row, epochs=2, **settings)
    *_, parameters = train_in_two_parts(row, tmp_path, **settings)
    if row.follows_times:
        torch.testing.assert_close(parameters.x, straight.x, rtol=1e-3, atol=1e-4)
    else:
        assert torch.equal(parameters.x, straight.x)
    assert parameters.version == straight.version


@backends(lambda row: row.algorithm.max_workers != 1 and (row.served or row.is_default) and not row.policy)
def test_counts_go_on(row, backend, tmp_path):
    """Each family, and every way of its servers. `test_stops.py` resumes the others, whose counts are made alike."""
    settings = {"task": LINEAR, "workers": 3, "backend": backend, **UNEVEN}
    _, run, parameters = train_in_two_parts(row, tmp_path, first=2, epochs=3, **settings)
    records = np.concatenate(list(run.records.values()))
    applied = records[records["applied_version"] > 0]
    if not row.algorithm.gossip:
        assert set(applied["applied_version"].tolist()) == set(range(1, parameters.version + 1))
    assert records["samples"].sum() == 3 * 1437
    batches = records["batch"][records["samples"] > 0]
    in_epoch = row.batches(BATCHES, 3)
    assert sorted(batches) == list(range(3 * in_epoch))
    assert run.result["computed_gradients"] == len(batches)
    assert run.result["records_lost"] == run.result["batches_repeated"] == run.result["batches_missed"] == 0
    if row.algorithm.lockstep:
        assert [len(own) for own in run.records.values()] == [3 * 29] * 3  # rounds without a batch counted in
    # A convex loss goes on from where it was: a start from new parameters would show as the initial one.
    third_epoch = applied[(applied["batch"] >= 2 * in_epoch) & (applied["batch"] < 2 * in_epoch + 40)]
    assert row.learning_follows_times or third_epoch["loss"].mean() < 0.75 * run.result["initial_loss"]
    second = np.concatenate([own[own["batch"] >= 2 * in_epoch] for own in run.records.values()])
    first = records[(records["batch"] >= 0) & (records["batch"] < 2 * in_epoch)]
    assert second["started_s"].min() >= first["ended_s"].max() - 1e-3


@pytest.mark.parametrize("durability", ["snapshot", "replica"])
def test_a_servers_checkpoint_does_not_depend_on_its_shards(durability, tmp_path):
    """Two epochs with one shard, two with three: momentum and all, as four epochs in one go."""
    one, three = (Row(pl.ParameterServer(shards=shards, durability=durability)) for shards in (1, 3))
    settings = {"workers": 3, "batch_size": 32, **ADAMW}
    _, straight = run_task(one, epochs=4, **settings)
    run_task(one, out=tmp_path, epochs=2, **settings)
    _, parameters = run_task(three, resume=tmp_path, epochs=4, **settings)
    torch.testing.assert_close(parameters.x, straight.x, rtol=1e-3, atol=1e-4)
    assert parameters.version == straight.version == 4 * 15


def test_shared_optimizer_state_goes_on_and_stays_shared(tmp_path):
    row = next(row for row in ROWS if row.spec == "locked")
    settings = {"optimizer": "adam", "learning_rate": 0.002, "optimizer_state": "shared", "batch_size": 31}
    _, straight = run_task(row, epochs=2, **settings)
    *_, parameters = train_in_two_parts(row, tmp_path, **settings)
    assert torch.equal(parameters.x, straight.x)


def test_a_new_learning_rate_replaces_the_checkpoints(tmp_path):
    settings = {"optimizer": "sgd", "momentum": 0.9, "batch_size": 31}
    run_task(ROWS[0], out=tmp_path, epochs=2, learning_rate=0.05, **settings)
    _, resumed = run_task(ROWS[0], resume=tmp_path, epochs=3, learning_rate=0.01, **settings)
    x, _ = plain_run(steps=3 * 47, batch_size=31, learning_rate=0.05, momentum=0.9, later=(2 * 47, 0.01))
    assert torch.equal(resumed.x, x)


def test_another_rule_of_the_servers_cannot_go_on(tmp_path):
    config = pl.TrainConfig(algorithm="adaptive-revision", workers=2, steps=20, backend="threads")
    pl.train(config, out=tmp_path)
    before = (tmp_path / "result.json").read_text()
    with pytest.raises(pl.UsageError, match=r"by adaptive-revision at its servers, .* cannot be resumed with downpour"):
        pl.train(pl.TrainConfig(algorithm="downpour", workers=2, steps=40, backend="threads"), resume=tmp_path)
    assert (tmp_path / "result.json").read_text() == before


@pytest.mark.parametrize("row", [Row(pl.Hogwild()), Row(pl.Leashed())], ids=["hogwild", "leashed"])
@pytest.mark.parametrize("ahead", [2, -2])
def test_a_checkpoint_taken_while_others_are_ahead_or_behind(row, ahead, tmp_path):
    """Ahead: two batches after its next one have made updates of it already. Behind: two before that made theirs after it."""
    run_task(row, out=tmp_path, epochs=2, batch_size=31)
    newest = checkpoint_files.newest(tmp_path / "checkpoint")
    saved = checkpoint.load_parameters(newest)
    changed = {"next_batch": saved.next_batch - ahead} if ahead > 0 else {"version": saved.version + ahead}
    rewrite(newest, checkpoint_files.PARAMETERS, **changed)
    rewrite_json(newest / "complete.json", events={})  # which are those up to the version before
    run, _ = run_task(row, resume=tmp_path, out=tmp_path, epochs=3, batch_size=31)
    batches = np.concatenate([rows["batch"] for rows in run.records.values()])
    missed = {92, 93} if ahead < 0 else set()
    assert sorted(batches) == sorted({*range(3 * 47)} - missed)
    assert (run.result["batches_repeated"], run.result["batches_missed"]) == (0, len(missed))
    assert (run.result["records_lost"], run.result["steps"]) == (0, len(batches))


def coded_loop(epochs, ended):
    """An odd number of rounds in the first epoch, after which `dq` has half a bit left over."""

    def train():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        xs = torch.randn(52, 16, generator=torch.Generator().manual_seed(1))
        with pl.attach(model, optimizer) as worker:
            for _ in range(epochs):
                for x in worker.batches(xs.split(2)):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
        ended.append(torch.nn.utils.parameters_to_vector(model.parameters()))

    return train


@pytest.mark.filterwarnings("ignore:The checkpoint was written with another number of workers")  # of memories of pieces
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("codec", ["power(rank=1, min_rate=1, warmup_steps=2)", "dq(target_bits=3.5)", "sign"])
def test_new_workers_code_as_the_others_do(codec, workers, tmp_path):
    """They begin with the factors, the counts and the bits of the first worker, and without error feedback."""
    settings = {"algorithm": f"all-reduce(codec={codec})", "backend": "threads"}
    pl.launch(coded_loop(1, []), workers=2, out=tmp_path, **settings)
    ended = []
    run = pl.launch(coded_loop(2, ended), workers=workers, resume=tmp_path, **settings)
    assert run.result["outcome"] == "stopped"
    assert len(ended) == workers
    assert all(torch.equal(one, ended[0]) for one in ended)


def taught_loop(epochs, seed, *, rate, ended=None):
    """A student follows a frozen teacher, which follows the student at this rate."""
    building = threading.Lock()

    def train():
        with building:
            torch.manual_seed(seed)
            student, teacher = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(False)
        model = torch.nn.ModuleList([student, teacher])
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        xs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        with pl.attach(model, optimizer) as worker:
            for _ in range(epochs):
                for x in worker.batches(xs.split(2)):
                    optimizer.zero_grad()
                    (student(x) - teacher(x)).square().mean().backward()
                    optimizer.step()
                    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                        slow.data.lerp_(fast.data, rate)
        if ended is not None:
            ended.append(torch.nn.utils.parameters_to_vector(model.parameters()))

    return train


@pytest.mark.parametrize("workers", [1, 2])
def test_frozen_parameters_that_the_loop_changes_go_on(workers, tmp_path):
    settings, straight, resumed = {"algorithm": "lockstep", "workers": workers, "backend": "threads"}, [], []
    pl.launch(taught_loop(2, 0, rate=0.1, ended=straight), **settings)
    pl.launch(taught_loop(1, 0, rate=0.1), out=tmp_path, **settings)
    pl.launch(taught_loop(2, 0, rate=0.1, ended=resumed), resume=tmp_path, **settings)
    assert all(torch.equal(one, straight[0]) for one in (*straight, *resumed))


def test_other_frozen_parameters_in_a_resumed_run_are_warned_of(tmp_path):
    settings = {"algorithm": "hogwild", "workers": 2, "backend": "threads"}
    pl.launch(taught_loop(1, 0, rate=0.0), out=tmp_path, **settings)
    pl.launch(taught_loop(2, 0, rate=0.0), resume=tmp_path, out=tmp_path, **settings)
    with pytest.warns(UserWarning, match=r"frozen parameter 1\.weight has another value"):
        pl.launch(taught_loop(3, 1, rate=0.0), resume=tmp_path, **settings)


def test_strips_with_a_parameter_without_dimensions_go_on(tmp_path):
    def train(epochs, ended):
        def loop():
            with building:
                torch.manual_seed(0)
                model = torch.nn.Linear(4, 1)
            model.scale = torch.nn.Parameter(torch.tensor(2.0))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            xs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
            with pl.attach(model, optimizer) as worker:
                for _ in range(epochs):
                    for x in worker.batches(xs.split(2)):
                        optimizer.zero_grad()
                        (model.scale * model(x)).square().mean().backward()
                        optimizer.step()
            ended.append(model.scale.item())

        return loop

    building, straight, resumed = threading.Lock(), [], []
    settings = {"algorithm": "all-reduce(sharded=true)", "workers": 2, "backend": "threads"}
    pl.launch(train(2, straight), **settings)
    pl.launch(train(1, []), out=tmp_path, **settings)
    pl.launch(train(2, resumed), resume=tmp_path, **settings)
    assert {*straight} == {*resumed} != {2.0}
