"""Simulated runs whose batches are as large as their workers are fast: the same updates, and sooner."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

import paceline as pl
from chosen import each_value
from contracts.linear_task import LINEAR
from paceline.simulator import Cluster, Faults

EQUAL = {"lockstep(shares=auto)": "lockstep", "all-reduce(shares=auto)": "all-reduce",
         "all-reduce(shares=auto, sharded=true)": "all-reduce(sharded=true)"}  # fmt: skip
METHODS = pytest.mark.parametrize("algorithm", EQUAL)


class Numbered(Dataset):
    """Samples that say which they are."""

    def __init__(self, samples):
        self.x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index]


class Backwards(Sampler):
    """A sampler of the user's own."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __iter__(self):
        return iter(range(self.number - 1, -1, -1))


class Pairs(BatchSampler):
    """A batch sampler of the user's own."""


def simulated(algorithm, loader, *, workers=2, epochs=2, slow=2.0, faults=None, seen=None, accumulate=1, **cluster):
    """Worker 0 is slow; returns the run, the models, and which samples each epoch had."""
    models, lengths = {}, {}
    seen = [] if seen is None else seen

    def train():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with pl.attach(model, optimizer) as worker:
            batches = worker.batches(loader)
            for epoch in range(epochs):
                number = 0
                for number, (index, x) in enumerate(batches, start=1):
                    seen.append((epoch, *index.tolist()))
                    loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / accumulate
                    loss.backward()
                    if number % accumulate == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                lengths.setdefault(worker.worker_id, []).append((number, len(batches)))
        models[worker.worker_id] = torch.cat([p.detach().flatten() for p in model.parameters()])

    slowness = ((0, slow),) if slow > 1 else ()
    cluster = Cluster(workers=workers, slowness=slowness, **cluster)
    run = pl.simulate(train, cluster=cluster, algorithm=algorithm, faults=faults)
    return run, models, lengths


def each_once(seen, samples, epochs=2):
    for epoch in range(epochs):
        assert indices_of(seen, epoch) == samples


def indices_of(seen, epoch):
    """Of the samples of an epoch's batches. A batch that a worker gets again because others have more counts once."""
    return sorted(index for found, *indices in set(seen) if found == epoch for index in indices)


def loader(samples, batch_size=8, **settings):
    return DataLoader(Numbered(samples), batch_size=batch_size, **{"shuffle": True} | settings)


@METHODS
@pytest.mark.parametrize(("workers", "samples"), [(2, 200), (2, 201), (3, 97), (5, 121), (5, 163), (3, 7)])
def test_updates_are_those_of_equal_batches_and_each_sample_comes_once(algorithm, workers, samples):
    """201 leaves a round of one sample; 121 of 5 leaves 1, 163 of 5 leaves 3; 7 are less than a round."""
    seen = []
    run, models, lengths = simulated(algorithm, loader(samples), workers=workers, seen=seen)
    equal, expected, _ = simulated(EQUAL[algorithm], loader(samples), workers=workers)
    each_once(seen, list(range(samples)))
    for one in models.values():
        assert torch.equal(one, models[0])
        torch.testing.assert_close(one, expected[0], rtol=1e-4, atol=1e-5)
    assert all(number == length for own in lengths.values() for number, length in own)
    assert run.result["samples"] == equal.result["samples"] == 2 * samples
    assert run.result["version"] == equal.result["version"]
    has_changed = run.result["version"] > 6
    slow, fast, *_ = run.result["batch_sizes"][-1]["sizes"]
    assert (slow < fast) == has_changed
    assert {"batch_sizes", "ideal_step_s"}.isdisjoint(equal.result)
    assert run.result["ideal_step_s"] > 0
    if has_changed:
        assert run.result["wall_s"] < equal.result["wall_s"]


@METHODS
@pytest.mark.parametrize("settings", [
    {"drop_last": True, "samples": 205},
    {"shuffle": False, "samples": 203},
    {"sampler": Backwards(150), "shuffle": None, "samples": 200},
    {"sampler": Backwards(147), "shuffle": None, "drop_last": True, "samples": 200},
    {"batch_sampler": BatchSampler(SequentialSampler(range(90)), 5, False), "batch_size": 1, "shuffle": None, "samples": 90},
])  # fmt: skip
def test_loaders_of_all_kinds(algorithm, settings):
    settings = dict(settings)
    samples = settings.pop("samples")
    seen, expected = [], []
    _, models, lengths = simulated(algorithm, loader(samples, **settings), seen=seen)
    _, models_of_equal, _ = simulated(EQUAL[algorithm], loader(samples, **settings), seen=expected)
    torch.testing.assert_close(models[0], models_of_equal[0], rtol=1e-4, atol=1e-5)
    for epoch in range(2):
        once = indices_of(expected, epoch)
        assert indices_of(seen, epoch) == once
        assert len(once) == len(set(once))
    assert all(number == length for own in lengths.values() for number, length in own)
    assert len({len(one) for one in seen}) > 2, "batches have other sizes"


class Held:
    """A batch of a class of the user's own."""

    def __init__(self, x):
        self.x = x


@METHODS
@pytest.mark.parametrize("is_object", [True, False])
def test_batches_weigh_what_was_dealt_whatever_they_are(algorithm, is_object):
    """A batch whose first tensor has another length, as sequences with their times first, or which has none to be seen."""

    def collate(samples):
        x = torch.stack([x for _, x in samples])
        return Held(x) if is_object else x.T.contiguous()

    def trained(algorithm):
        models = {}

        def train():
            torch.manual_seed(0)
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with pl.attach(model, optimizer) as worker:
                for batch in worker.batches(loader(200, collate_fn=collate)):
                    x = batch.x if is_object else batch.T
                    (model(x) - x.square().sum(1, keepdim=True)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            models[worker.worker_id] = torch.cat([p.detach().flatten() for p in model.parameters()])

        return pl.simulate(train, cluster=Cluster(workers=2, slowness=((0, 3.0),)), algorithm=algorithm), models[0]

    run, x = trained(algorithm)
    torch.testing.assert_close(x, trained(EQUAL[algorithm])[1], rtol=1e-4, atol=1e-5)
    assert run.result["batch_sizes"][-1]["sizes"] == [4, 12]
    assert run.result["samples"] == 200


def test_a_step_of_several_backward_passes():
    run, models, _ = simulated("all-reduce(shares=auto)", loader(320), accumulate=2)
    _, expected, _ = simulated("all-reduce", loader(320), accumulate=2)
    sizes = run.result["batch_sizes"][-1]["sizes"]
    assert sum(sizes) == 32
    assert 10 <= sizes[0] <= 12, "waiting between the passes is not the worker's own time"
    assert torch.isfinite(models[0]).all()
    assert models[0].shape == expected[0].shape


@METHODS
def test_a_worker_slowed_by_3_is_seen_within_20_steps_and_gets_its_share_back(algorithm):
    step_s = 0.01
    faults = Faults().slow(worker=1, factor=3, step=43).slow(worker=1, factor=1 / 3, step=120)
    run, _, _ = simulated(algorithm, loader(3200, 16), faults=faults, slow=1, epochs=2)
    sizes = {one["version"]: one["sizes"] for one in run.result["batch_sizes"]}
    assert sizes[1] == [16, 16]
    seen, back = list(sizes)[1], list(sizes)[-1]
    assert 43 <= seen <= 63
    assert sizes[seen] == [24, 8]
    assert 120 <= back <= 140
    assert sizes[back] == [16, 16]
    durations_s = [
        np.median(own["gradient_ended_s"][70:110] - own["gradient_started_s"][70:110]) for own in run.records.values()
    ]
    assert durations_s == pytest.approx([1.5 * step_s] * 2, rel=0.05)


@METHODS
def test_equal_workers_keep_equal_batches(algorithm):
    run, _, _ = simulated(algorithm, loader(400), workers=3, slow=1)
    assert [one["sizes"] for one in run.result["batch_sizes"]] == [[8, 8, 8]]


def test_batches_that_cannot_be_divided_are_refused_by_name():
    with pytest.raises(pl.UsageError, match=r"shares=auto .* cannot divide the batches of a list of batches"):
        simulated("lockstep(shares=auto)", [(torch.arange(4), torch.randn(4, 4))] * 6)
    pairs = Pairs(RandomSampler(range(40)), 2, False)
    with pytest.raises(pl.UsageError, match="cannot divide the batches of Pairs"):
        simulated("lockstep(shares=auto)", DataLoader(Numbered(40), batch_sampler=pairs))
    with pytest.raises(pl.UsageError, match="a DataLoader without batch_size"):
        simulated("lockstep(shares=auto)", DataLoader(Numbered(40), batch_size=None))


@METHODS
def test_a_loop_that_fetches_its_own_batches_is_refused(algorithm):
    def train():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer):
            for _ in range(3):
                model(torch.randn(8, 4)).sum().backward()
                optimizer.step()

    with pytest.raises(pl.UsageError, match="this loop fetches its own batches"):
        pl.simulate(train, workers=2, algorithm=algorithm)


def test_a_killed_worker_ends_a_sharded_run():
    with pytest.raises(pl.WorkerLostError, match="worker 1"):
        simulated("all-reduce(shares=auto, sharded=true)", loader(400), faults=Faults().kill(worker=1, step=12))


SURVIVED = ["lockstep(shares=auto)", "all-reduce(shares=auto)", "all-reduce(shares=auto, codec=qsgd)"]


@pytest.mark.parametrize(
    ("algorithm", "kills"),
    each_value(SURVIVED, [{0: 12}, {1: 12}, {2: 9}, {1: 8, 2: 14}, {0: 17, 1: 19}, {2: 3}, {1: 17, 2: 17}]),
    ids=str,
)
@pytest.mark.parametrize("sampler", [None, Backwards(400)])
def test_survivors_train_on_each_sample_once_and_by_their_speeds(algorithm, sampler, kills):
    """Worker 0 is slow; an epoch has 17 rounds of three workers. Two workers share rounds that were cut for three."""
    faults, seen = Faults(), []
    for worker, step in kills.items():
        faults = faults.kill(worker=worker, step=step)
    data = loader(400, **({"sampler": sampler, "shuffle": None} if sampler else {}))
    settings = {"workers": 3, "slow": 3.0, "collective": "memory"}
    run, models, _ = simulated(algorithm, data, faults=faults, seen=seen, **settings)
    assert run.result["workers_lost"] == sorted(kills)
    each_once(seen, list(range(400)))
    first, *others = models.values()
    assert all(torch.equal(first, other) for other in others)
    lost = sum(rows["samples"].max() for worker, rows in run.records.items() if worker in kills)
    assert 800 - run.result["records_lost"] * lost <= run.result["samples"] <= 800
    sizes = {worker: np.median(rows["samples"][-8:-1]) for worker, rows in run.records.items() if worker in models}
    if 0 in sizes and len(sizes) == 2:
        assert 2 <= max(sizes.values()) / sizes[0] <= 3.5
    elif len(sizes) == 2:
        assert len(set(sizes.values())) == 1


def test_a_lone_worker_has_whole_batches():
    run, _, _ = simulated("all-reduce(shares=auto)", loader(40), workers=1)
    assert set(run.records[0]["samples"].tolist()) == {8}


def task(algorithm, **more):
    settings = {"task": LINEAR, "workers": 2, "epochs": 2, "seed": 3} | more  # whose rounding errors do not grow
    return pl.simulate_task(
        pl.TrainConfig(algorithm=algorithm, **settings), cluster=Cluster(workers=2, slowness=((0, 2.0),))
    )


@METHODS
def test_a_task_takes_its_work_divided_by_the_sum_of_the_speeds(algorithm):
    fast, equal = task(algorithm, epochs=8), task(EQUAL[algorithm], epochs=8)
    assert fast.result["samples"] == equal.result["samples"]
    assert fast.result["wall_s"] < 0.77 * equal.result["wall_s"]
    assert fast.result["test_loss"] == pytest.approx(equal.result["test_loss"], rel=1e-4)


@pytest.mark.parametrize("algorithm", SURVIVED)
@pytest.mark.parametrize("restarts", [0, 2])
def test_a_task_goes_on_without_and_with_replacements(algorithm, restarts):
    faults = Faults().kill(worker=1, step=8).kill(worker=0, step=30)
    config = pl.TrainConfig(task=LINEAR, algorithm=algorithm, epochs=4, seed=3, restarts=restarts)
    cluster = Cluster(workers=3, slowness=((0, 3.0),), collective="memory", restart_s=0.1)
    run = pl.simulate_task(config, cluster=cluster, faults=faults)
    assert (run.result["outcome"], run.result["workers_lost"], run.result["restarts"]) == ("stopped", [0, 1], restarts)
    trained = [rows[rows["samples"] > 0] for rows in run.records.values()]
    batches = np.concatenate([rows["batch"] for rows in trained])
    assert len({*batches.tolist()}) == len(batches) == 4 * 180 - run.result["records_lost"]
    sizes = [np.median(rows["samples"][-30:]) for rows in trained]
    assert all(sum(one["sizes"]) == 24 and min(one["sizes"]) for one in run.result["batch_sizes"])
    if restarts:
        assert sizes[1] == sizes[2] == pytest.approx(3 * sizes[0], rel=0.35)
        assert sum(rows["samples"].sum() for rows in trained) == pytest.approx(
            4 * 1437, abs=30 * run.result["records_lost"]
        )


@pytest.mark.parametrize("partition", ["fixed", "skewed(alpha=0.1)"])
def test_workers_that_own_their_samples_are_refused(partition):
    with pytest.raises(pl.UsageError, match=r"shares=auto .* partition gives each worker its own samples"):
        task("all-reduce(shares=auto)", partition=partition)
    task("all-reduce", partition=partition)


def test_sizes_are_in_the_result_the_trace_and_the_report(tmp_path):
    config = pl.TrainConfig(task="digits-mlp", algorithm="lockstep(shares=auto)", workers=2, epochs=2)
    cluster = Cluster(workers=2, slowness=((0, 2.0),))
    run = pl.simulate_task(config, cluster=cluster, out=tmp_path / "run")
    sizes = json.loads((tmp_path / "run" / "result.json").read_text())["batch_sizes"]
    assert sizes == run.result["batch_sizes"]
    assert sizes[0]["sizes"] == [8, 8]
    assert sizes[-1]["sizes"] == [5, 11]
    assert "batch size, worker 1 (samples)" in (tmp_path / "run" / "trace.json").read_text()
    assert "How large each worker" in (tmp_path / "run" / "report.html").read_text()
