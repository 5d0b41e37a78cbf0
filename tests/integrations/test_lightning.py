"""Lightning's Trainer with our strategy, the real package: alone it is the plain Trainer, bit for bit; in a run all learn."""

import builtins
import importlib
import sys

import numpy as np
import pytest
import torch

import paceline as pl

lightning = pytest.importorskip("lightning", reason="needs the extra: pip install 'paceline[lightning]'")
from integrations import lightning_programs as programs  # noqa: E402
from integrations.lightning_programs import Classifier, fit, launched, vector  # noqa: E402
from paceline.integrations.lightning import PacelineStrategy  # noqa: E402
from real_data import needs_mnist  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"limit_train_batches": 7},
    ],
    ids=["plain", "accumulation", "clipping", "bf16-mixed", "fewer batches"],
)
@pytest.mark.parametrize("optimizer", [("SGD", {"lr": 0.3, "momentum": 0.9}), ("AdamW", {"lr": 0.01})])
def test_one_worker_is_the_plain_trainer_bit_for_bit(optimizer, settings):
    name, own = optimizer
    found = [fit(one, lambda: Classifier(name, by_step=True, **own), **settings) for one in ("auto", "paceline")]
    (plain, plain_trainer), (ours, our_trainer) = found
    assert np.array_equal(vector(plain), vector(ours))
    assert plain_trainer.global_step == our_trainer.global_step > 0
    assert plain_trainer.callback_metrics == our_trainer.callback_metrics
    rates = [one.optimizers().param_groups[0]["lr"] for one in (plain, ours)]
    assert rates[0] == rates[1] < own["lr"]


def test_going_on_from_a_checkpoint_of_lightnings_is_as_with_the_plain_trainer(tmp_path):
    def made():
        return Classifier("AdamW", lr=0.01)

    first, trainer = fit(PacelineStrategy(), made, epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, plain = (
        fit(one, made, epochs=3, checkpoint=tmp_path / "two.ckpt")[0] for one in (PacelineStrategy(), "auto")
    )
    assert np.array_equal(vector(resumed), vector(plain))
    assert not np.array_equal(vector(resumed), vector(first))


@pytest.mark.parametrize(
    ("algorithm", "workers"),
    [
        ("all-reduce", 2),
        ("all-reduce", 4),
        ("ad-psgd", 2),
        ("parameter-server(mode=async)", 2),
        ("hogwild", 2),
        ("parameter-server", 3),
    ],
)
def test_all_workers_learn_and_end_with_one_model(algorithm, workers, tmp_path):
    run, told, vectors = launched(programs.learn, tmp_path, False, workers=workers, algorithm=algorithm)
    assert run.result["outcome"] == "stopped"
    assert run.result["samples"] == 4 * 1440
    assert sorted(told) == list(range(workers))
    assert all(np.array_equal(one, vectors[0]) for one in vectors.values())
    assert min(one["accuracy"] for one in told.values()) > 0.85
    losses = {one["loss"] for one in told.values()}
    assert len(losses) == (1 if algorithm == "all-reduce" else workers)


@needs_mnist
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize(
    ("algorithm", "rate"),
    [("all-reduce", 0.6), ("ad-psgd", 0.6), ("parameter-server(mode=async)", 0.2), ("hogwild", 0.2)],
)
def test_all_workers_learn_mnist(algorithm, rate, workers, tmp_path):
    _, told, vectors = launched(programs.learn_mnist, tmp_path, rate, workers=workers, algorithm=algorithm)
    assert sorted(told) == list(range(workers))
    assert all(np.array_equal(one, vectors[0]) for one in vectors.values())
    module = programs.mnist_classifier()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(vectors[0]), module.parameters())
    x, y = programs.mnist()[1].tensors
    assert (module.net(x).argmax(1) == y).double().mean() > 0.95


@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild"])
def test_a_schedule_per_step_follows_the_runs_steps(algorithm, tmp_path):
    """Two workers make as many steps together as one alone, or half as many: the schedule is where the run is."""
    _, told, _ = launched(programs.learn, tmp_path, True, workers=2, algorithm=algorithm)
    steps = 4 * (23 if algorithm == "all-reduce" else 45)
    rate = 0.3 * (1 - 0.9 * min(steps, 90) / 90)
    assert [one["rate"] for one in told.values()] == pytest.approx([rate] * 2, rel=0.05)


def test_one_that_stops_early_stops_all_in_lockstep(tmp_path):
    _, told, _ = launched(programs.stop_early, tmp_path, workers=2, algorithm="all-reduce")
    assert {one["epochs"] for one in told.values()} == {2}


def test_worker_0_writes_the_checkpoint(tmp_path):
    launched(programs.save, tmp_path, workers=2, algorithm="all-reduce")
    state = torch.load(tmp_path / "best.ckpt", weights_only=False)["state_dict"]
    assert set(state) == set(Classifier().state_dict())
    assert not list(tmp_path.glob("best-v*"))


def test_a_killed_worker_does_not_end_the_others(tmp_path):
    run, told, vectors = launched(programs.die, tmp_path, workers=3, algorithm="ad-psgd")
    assert sorted(told) == [0, 2]
    assert run.result["workers_lost"] == [1]
    assert np.array_equal(vectors[0], vectors[2])
    assert min(one["accuracy"] for one in told.values()) > 0.85


def test_what_cannot_be_is_one_sentence():
    with pytest.raises(pl.UsageError, match="leave out reload_dataloaders_every_n_epochs"):
        fit(PacelineStrategy(), reload_dataloaders_every_n_epochs=1)
    with pytest.raises(pl.UsageError, match="LBFGS evaluates several gradients"):
        fit(PacelineStrategy(), lambda: Classifier("LBFGS", lr=0.1))
    with pytest.raises(pl.UsageError):
        PacelineStrategy("no such algorithm")


def test_without_the_package_the_extra_is_named(monkeypatch):
    imported = builtins.__import__

    def without(name, *others, **more):
        if name.partition(".")[0] == "lightning":
            raise ImportError(name)
        return imported(name, *others, **more)

    monkeypatch.delitem(sys.modules, "paceline.integrations.lightning")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(pl.UsageError, match=r"paceline\[lightning\]"):
        importlib.import_module("paceline.integrations.lightning")
