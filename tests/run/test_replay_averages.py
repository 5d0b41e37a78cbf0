"""Replays of workers that average in pairs, at any time between their updates."""

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.optim.flat import FlatBinding
from paceline.run.gossip_order import AverageOrder
from paceline.tasks.load import load_task
from run.replay_task import TASK, check_noticed, rewrite, simulated, trained, write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def cluster(workers, **named):
    """A slow network: averages begin and end in the middle of gradients, and requests cross."""
    return pl.Cluster(workers=workers, slowness=((0, 1.7), (1, 2.9)), latency_s=0.007, compute_s=0.01, **named)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory, task):
    folder = tmp_path_factory.mktemp("runs") / "averaged"
    return simulated(folder, task, "ad-psgd(topology=complete)", cluster=cluster(4), workers=4, momentum=0.9)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ["ad-psgd", "ad-psgd(topology=complete,peers=rotate)"])
def test_averages_are_made_at_their_places(tmp_path, task, algorithm, workers):
    folder = simulated(tmp_path / "run", task, algorithm, cluster=cluster(workers), workers=workers)
    run = pl.RunData.load(folder)
    halves = np.concatenate([*run.order.values()])
    assert len(halves) >= sum(rows["averages"].sum() for rows in run.records.values()) > 0
    assert (halves["of"] < halves["moment"] - 1).any(), "an update is made while an answer is under way"
    replayed = pl.RecordedRun(folder).replay()
    assert replayed.updates == replayed.steps == run.result["computed_gradients"]


@pytest.mark.parametrize("restarts", [0, 1])
def test_deaths_are_replayed(tmp_path, task, restarts):
    faults = pl.Faults().kill(worker=1, at_s=0.083)
    times = {"detection_s": 0.01, "restart_s": 0.01}
    named = {"cluster": cluster(3, **times), "faults": faults, "restarts": restarts}
    folder = simulated(tmp_path / "run", task, "ad-psgd(topology=complete)", **named)
    run = pl.RunData.load(folder)
    assert run.result["workers_lost"] == [1]
    assert run.records[1]["incarnation"].max() == restarts
    assert (run.order[1]["of"] == 2**32 - 1).sum() == restarts, "a replacement copies a neighbour's model"
    assert pl.RecordedRun(folder).replay().steps == sum(map(len, run.records.values()))


def drop(run):
    run.order[1] = np.delete(run.order[1], 3)


def drop_step(run):
    run.records[1] = np.delete(run.records[1], 3)


def repeat(run):
    run.order[1] = run.order[1][[0, *range(len(run.order[1]))]]


@pytest.mark.parametrize(
    ("change", "why"),
    [(drop, "averages of worker 1"), (repeat, "averages of worker 1"), (drop_step, "lacks records of steps")],
)
def test_missing_averages_are_refused(averaged, change, why):
    with pytest.raises(pl.UsageError, match=why):
        pl.RecordedRun(rewrite(averaged, change))


def swap_partners(run):
    rows = run.order[1]
    place = np.flatnonzero(np.diff(rows["peer"].astype(int)))[2]
    rows["peer"][[place, place + 1]] = rows["peer"][[place + 1, place]]


def swap_halves(run):
    rows = run.order[2]
    for name in ("at", "of", "peer"):
        rows[name][[4, 5]] = rows[name][[5, 4]]


def change_partners_version(run):
    """To the model before the partner's gradient; an average of two models that are equal already changes nothing."""
    rows = run.order[0]
    made = [at in run.records[peer]["applied_version"] for at, peer in zip(rows["at"], rows["peer"], strict=True)]
    rows["at"][np.flatnonzero(made)[1]] -= 1


def change_own_version(run):
    rows = run.order[0]
    rows["of"][np.flatnonzero(np.isin(rows["of"], run.records[0]["applied_version"]))[1]] -= 1


@pytest.mark.parametrize("change", [swap_partners, swap_halves, change_partners_version, change_own_version])
def test_other_averages_are_noticed(averaged, change):
    check_noticed(rewrite(averaged, change))


def test_an_average_takes_16_bytes(averaged):
    run = pl.RunData.load(averaged)
    steps = sum(map(len, run.records.values()))
    assert np.median([rows.nbytes / steps * len(run.order) for rows in run.order.values()]) <= 32


def trajectory(recorded, monkeypatch):
    """Every worker's model at every version, from a replay of the whole run."""
    models, reached = {}, AverageOrder.reached

    def noted(self):
        models[(*self.process, self.shared.version)] = self.shared.x.clone()
        reached(self)

    with monkeypatch.context() as patch:
        patch.setattr(AverageOrder, "reached", noted)
        recorded.replay()
    return models


def parameters_at(task, x):
    """Another model of the task, with the parameters of a flat vector."""
    model = load_task(task).model().train()
    FlatBinding(model.parameters()).bind(x.clone())
    return model


def obvious_gradients(task, model, samples):
    """Of one batch, by PyTorch alone."""
    features, targets = load_task(task).load(None)[0][samples]
    load_task(task).loss(model(features), targets).backward()
    return [one.grad for one in model.parameters()]


@pytest.mark.parametrize("restarts", [0, 1])
def test_an_update_is_shown_with_its_workers_model(tmp_path, task, monkeypatch, restarts):
    """Updates are counted over all workers, by the time of their records."""
    faults = pl.Faults().kill(worker=1, at_s=0.083)
    named = {"cluster": cluster(3, detection_s=0.01, restart_s=0.01), "faults": faults, "restarts": restarts}
    recorded = pl.RecordedRun(simulated(tmp_path / "run", task, "ad-psgd(topology=complete)", **named))
    models = trajectory(recorded, monkeypatch)
    run = pl.RunData.load(tmp_path / "run")
    rows = [(row["ended_s"], worker, row) for worker, own in run.records.items() for row in own]
    rows = sorted((one for one in rows if one[2]["applied_version"] > 0), key=lambda one: one[:2])
    assert recorded.updates == len(rows)
    for number in (1, 2, 7, len(rows) // 2, len(rows) - 1, len(rows)):
        update = recorded.at(number)
        _, worker, row = rows[number - 1]
        (step,) = update.steps
        assert (step["worker"], step["step"], step["batch"]) == (worker, row["step"], row["batch"])
        after, read = (models[worker, row["incarnation"], row[name]] for name in ("applied_version", "read_version"))
        assert all(map(torch.equal, update.model.parameters(), parameters_at(task, after).parameters()))
        gradients = obvious_gradients(task, parameters_at(task, read), step["samples"])
        views = FlatBinding(update.model.parameters()).views(step["gradient"])
        assert all(map(torch.equal, views, gradients))


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("sample", [7, 123, 236])
def test_bisection_finds_the_update_of_one_sample(tmp_path, sample, restarts):
    """Only that sample has a feature, so a weight changes with it, and at the others by averages: whichever worker has it."""
    script = tmp_path / "signs.py"
    script.write_text(TASK.replace("    data =", f"    x[:, 5] = 0\n    x[{sample}, 5] = 1\n    data ="))
    faults = pl.Faults().kill(worker=1, at_s=0.083)
    named = {"cluster": cluster(3, detection_s=0.01, restart_s=0.01), "faults": faults, "restarts": restarts}
    recorded = pl.RecordedRun(simulated(tmp_path / "run", f"{script}:task", "ad-psgd(topology=complete)", **named))
    before = load_task(f"{script}:task").new_model(recorded.config.seed)[0].weight[:, 5].detach().clone()
    tried = []
    found = recorded.first(
        lambda model: not torch.equal(model[0].weight[:, 5], before), told=lambda number, _: tried.append(number)
    )
    (step,) = found.steps
    assert sample in step["samples"]
    assert not torch.equal(found.model[0].weight[:, 5], before)
    assert not any(sample in recorded.at(number).steps[0]["samples"] for number in range(1, found.version))
    assert len(tried) <= 1 + recorded.updates.bit_length()
    assert recorded.first(lambda model: False) is None


def test_updates_that_are_not_there_are_refused(averaged):
    recorded = pl.RecordedRun(averaged)
    for number in (0, recorded.updates + 1):
        with pytest.raises(pl.UsageError, match=f"has updates 1 to {recorded.updates}, not"):
            recorded.at(number)


def test_rounds_of_workers_with_own_models_have_no_single_updates(tmp_path, task):
    recorded = pl.RecordedRun(trained(tmp_path / "run", task, "d-psgd", epochs=1))
    with pytest.raises(pl.UsageError, match="its own model and updates: replay the whole run"):
        recorded.at(3)
