"""Targets and limits of simulated loops: which model is evaluated, when the run ends, and what that must not disturb."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl

SAMPLES = 240
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(SAMPLES, 6, generator=GENERATOR)
Y = (X[:, :1] > 0).float()
DATA = torch.utils.data.TensorDataset(X, Y)


class Loop:
    """A classifier of two classes, with dropout and batch normalisation; keeps what `evaluate` was given, and the ends."""

    def __init__(self, evaluate="own", epochs=6, reports=True):
        self.evaluate = self._evaluate if evaluate == "own" else evaluate
        self.epochs = epochs
        self.reports = reports
        self.seen = []
        self.ended = 0

    def _evaluate(self, model):
        assert not model.training
        assert not torch.is_grad_enabled()
        random.random(), np.random.rand(), torch.rand(1)  # as whoever shuffles a test set does
        self.seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        right = float(((model(X) > 0).float() == Y).float().mean())
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.fill_(9.0)  # it is nobody's but ours
        return right

    def __call__(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(DATA, batch_size=10, shuffle=True)
        try:
            with pl.attach(model, optimizer, evaluate=self.evaluate) as worker:
                for _ in range(self.epochs):
                    for x, y in worker.batches(loader):
                        optimizer.zero_grad()
                        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
                        loss.backward()
                        optimizer.step()
                        if self.reports:
                            worker.report(loss)
        finally:
            self.ended += 1
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("algorithm", ["hogwild", "lockstep", "ad-psgd", "parameter-server(mode=async)"])
def test_a_run_ends_at_the_instant_of_its_target(algorithm):
    loop = Loop()
    run = pl.simulate(loop, workers=3, algorithm=algorithm, target_accuracy=0.9)
    result, evaluations = run.result, run.evaluations
    assert result["outcome"] == "converged"
    *before, reached, at_the_end = evaluations
    assert all(one["test_accuracy"] < 0.9 for one in before)
    assert reached["test_accuracy"] >= 0.9
    assert result["time_to_target_s"] == reached["elapsed_s"]
    assert result["target_accuracy"] == 0.9
    # An epoch has 240 samples: evaluated each 60, then the run is over, with nothing after that instant.
    assert [one["samples"] // 60 for one in before] == list(range(1, len(before) + 1))
    assert max(float(rows["ended_s"].max()) for rows in run.records.values()) <= reached["elapsed_s"]
    assert at_the_end["samples"] == reached["samples"] < 6 * SAMPLES
    assert reached.keys() >= {"elapsed_s", "samples", "train_loss", "test_loss", "test_accuracy", "version"}
    assert loop.ended == 3
    assert run.returned == {}


def test_the_mean_of_the_workers_models_is_evaluated():
    loop = Loop()
    run = pl.simulate(loop, workers=3, algorithm="local-sgd(period=7)", limit_samples=100)
    assert run.result["consensus_distance"] > 1e-6
    final, *own = loop.seen[-4:]
    for name in ("0.weight", "4.weight"):
        assert torch.allclose(final[name], sum(one[name] for one in own) / 3, atol=1e-6)
        assert not any(torch.equal(final[name], one[name]) for one in own)


@pytest.mark.parametrize("algorithm", ["hogwild", "lockstep"])
def test_newest_parameters_and_the_runs_buffers_are_evaluated(algorithm):
    loop = Loop(epochs=1)
    run = pl.simulate(loop, workers=2, algorithm=algorithm, evaluate_every_samples=SAMPLES)
    assert len(loop.seen) == len(run.evaluations) == 2
    assert loop.seen[-1].keys() == run.returned[0].keys()
    for name, tensor in run.returned[0].items():
        assert torch.equal(loop.seen[-1][name], tensor), name


@pytest.mark.parametrize("algorithm", ["leashed", "ad-psgd"])
def test_evaluating_disturbs_nothing(algorithm):
    plain, watched = Loop(evaluate=None), Loop()
    cluster = pl.Cluster(workers=3).slow(worker=1, factor=3)
    runs = [
        pl.simulate(one, cluster=cluster, algorithm=algorithm, seed=4, evaluate_every_samples=50)
        for one in (plain, watched)
    ]
    assert len(watched.seen) > 28
    for worker in range(3):
        assert runs[0].records[worker].tobytes() == runs[1].records[worker].tobytes()
        for name, tensor in runs[0].returned[worker].items():
            assert torch.equal(tensor, runs[1].returned[worker][name]), name


def test_a_target_loss_is_the_mean_of_the_last_hundred():
    run = pl.simulate(Loop(epochs=30), workers=2, algorithm="hogwild", target_loss=0.35)
    records = np.concatenate(list(run.records.values()))
    records = records[np.argsort(records["applied_version"])]
    losses, before = records["loss"], records["ended_s"] < records["ended_s"].max()  # two may end at one instant
    assert run.result["outcome"] == "converged"
    assert losses[-100:].mean() <= 0.35 < losses[before][-100:].mean()
    assert run.evaluations[-1]["train_loss"] == pytest.approx(losses[-100:].mean())


@pytest.mark.parametrize(("limit", "samples"), [({"limit_samples": 95}, 100), ({"limit_s": 1e-9}, 0)])
def test_limits(limit, samples):
    loop = Loop()
    run = pl.simulate(loop, workers=2, algorithm="locked", **limit)
    assert run.result["outcome"] == "stopped"
    assert run.result["samples"] == samples
    assert loop.ended == 2
    assert run.config["limit_samples"] == limit.get("limit_samples")


def test_a_limit_in_virtual_time():
    cluster = pl.Cluster(workers=2)
    whole = pl.simulate(Loop(), cluster=cluster, algorithm="hogwild").result["wall_s"]
    run = pl.simulate(Loop(), cluster=cluster, algorithm="hogwild", limit_s=whole / 3)
    assert 0.25 * whole < run.result["wall_s"] <= whole / 3


def test_without_a_wish_nobody_evaluates(tmp_path):
    loop = Loop(epochs=2)
    assert pl.simulate(loop, workers=2, algorithm="hogwild").evaluations == []
    assert loop.seen == []
    run = pl.simulate(loop, workers=2, algorithm="hogwild", out=tmp_path)
    assert [one["samples"] for one in run.evaluations] == [240, 480, 480]
    assert pl.RunData.load(tmp_path).evaluations == run.evaluations


def no_accuracy(model):
    return {"loss": 1.0}


@pytest.mark.parametrize(
    ("evaluate", "says"),
    [
        (None, "give attach a function of the model"),
        (lambda model: "very good", "evaluate returned 'very good' as accuracy"),
        (lambda model: None, "evaluate returned None"),
        (lambda model: 96.0, r"evaluate returned 96\.0.*0\.95 is 95 %"),
        (lambda model: {"f1": 0.5}, "a mapping with f1"),
        (no_accuracy, "the run has a target accuracy"),
    ],
)
def test_what_cannot_be_judged(evaluate, says):
    with pytest.raises(pl.UsageError, match=says):
        pl.simulate(Loop(evaluate=evaluate), workers=2, algorithm="hogwild", target_accuracy=0.9)


@pytest.mark.parametrize(
    ("goal", "says"),
    [
        ({"target_loss": 1, "target_accuracy": 0.5}, "not both"),
        ({"target_accuracy": 96}, "target_accuracy must be at most 1, not 96: it is a fraction"),
        ({"target_loss": float("nan")}, "must be a number"),
        ({"limit_s": 0}, "limit_s must be a number above 0"),
        ({"limit_samples": 0}, "limit_samples must be 1 or more"),
        ({"evaluate_every_samples": 0}, "evaluate_every_samples must be 1 or more"),
    ],
)
def test_goals_that_cannot_be(goal, says):
    with pytest.raises(pl.UsageError, match=says):
        pl.simulate(Loop(), workers=2, algorithm="hogwild", **goal)


def test_a_model_that_cannot_be_copied_is_named():
    def train():
        model = nn.Linear(2, 1)
        model.made = model.weight * 2  # a tensor in autograd's graph
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), evaluate=lambda model: 1.0):
            pass

    with pytest.raises(pl.UsageError, match=r"copy\.deepcopy cannot make one"):
        pl.simulate(train, workers=1, target_accuracy=0.5)
