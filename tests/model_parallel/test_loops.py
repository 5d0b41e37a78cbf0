"""What loops do around a placed model: shuffle, fetch batches by themselves, evaluate, call it without gradients."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from model_parallel.models import BATCH, STEPS, alone, data, made, placed, planned, steps_of
from paceline.model_parallel.graph.exchange import Exchange

NAME = "two towers"


def test_shuffled_batches_are_the_same_on_all_workers_in_every_epoch(tmp_path):
    run, found = placed(NAME, planned(NAME, 2), tmp_path, loop={"epochs": 2, "shuffle": True})
    first, second = ([one[0] for one in steps] for steps, _ in found)
    assert first == second
    assert len(first) == 2 * STEPS
    assert first != [one[0] for one in alone(NAME, epochs=2)[0]]
    assert run.result["samples"] == 2 * STEPS * BATCH, "each sample counts once"
    assert run.result["waits_for"] is None, "parts wait for each other"


def own_batches(plan, folder):
    """Fetches by itself, and looks at the model between two steps; the second worker's part calls no module of its own."""
    part = plan.part(made(NAME))
    optimizer = torch.optim.Adam(part.parameters(), lr=0.01)
    losses = []
    with pl.attach(part, optimizer, evaluate=accuracy) as worker:
        for x, y in torch.utils.data.DataLoader(data(NAME), batch_size=BATCH):
            with torch.no_grad():
                before = F.cross_entropy(part(x), y).item()
            optimizer.zero_grad()
            loss = F.cross_entropy(part(x), y)
            assert loss.item() == before
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            worker.report(loss)
    torch.save((losses, part.whole.state_dict()), Path(folder) / f"own-{worker.worker_id}.pt")


def accuracy(model):
    x, y = data(NAME)[:]
    return (model(x).argmax(1) == y).double().mean().item()


def test_a_loop_that_fetches_its_own_batches_is_equal_too_and_is_evaluated_whole(tmp_path):
    plan = planned(NAME, 3)
    run = pl.launch(partial(own_batches, plan, tmp_path), workers=3, plan=plan, out=tmp_path / "run")
    expected, model = alone(NAME)
    for worker in range(3):
        losses, state = torch.load(tmp_path / f"own-{worker}.pt", weights_only=False)
        assert losses == [one[0] for one in expected]
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert run.result["steps"] == STEPS
    assert run.evaluations, "with the whole model"
    assert all(math.isfinite(one["test_accuracy"]) for one in run.evaluations)


def evaluating_a_tower(plan, folder):
    part = plan.part(made(NAME))
    optimizer = torch.optim.Adam(part.parameters(), lr=0.01)
    x, found = data(NAME)[:BATCH][0], []
    with pl.attach(part, optimizer) as worker:
        for _ in range(2):
            steps_of(part, optimizer, worker.batches(torch.utils.data.DataLoader(data(NAME), batch_size=BATCH)))
            part.eval()
            found += [part.fetch("a", x), part.fetch(["head", "b.0"], x)[0]]
            part.train()
    torch.save(found, Path(folder) / f"{worker.worker_id}.pt")


def test_a_tower_is_evaluated_by_itself_between_epochs(tmp_path):
    plan, expected = planned(NAME, 3), []
    pl.launch(partial(evaluating_a_tower, plan, tmp_path), workers=3, plan=plan)
    for epochs in (1, 2):
        _, model = alone(NAME, epochs=epochs)
        with torch.no_grad():
            expected += [model.a(data(NAME)[:BATCH][0]), model(data(NAME)[:BATCH][0])]
    for worker in range(3):
        assert all(map(torch.equal, torch.load(tmp_path / f"{worker}.pt"), expected))


def whole_model(plan):
    model = made(NAME)
    with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        pass


def test_a_loop_that_attaches_the_whole_model_is_told_so():
    plan = planned(NAME, 2)
    with pytest.raises(pl.UsageError, match=r"launch was given a plan: attach plan\.part\(model\)"):
        pl.launch(partial(whole_model, plan), workers=2, plan=plan)


def another_worker(plan, worker=None):
    part = plan.part(made(NAME), worker=worker)
    pl.attach(part, torch.optim.SGD(part.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (lambda plan: partial(another_worker, plan, 0), r"worker 0's part of a plan, but it runs in worker 1"),
        (
            lambda plan: partial(another_worker, planned(NAME, 2, wire="bfloat16")),
            'outside of `if __name__ == "__main__":`',
        ),
    ],
)
def test_another_part_than_the_launchs_is_refused(loop, message):
    plan = planned(NAME, 2)
    with pytest.raises(pl.UsageError, match=message):
        pl.launch(loop(plan), workers=2, plan=plan)


def elsewhere(plan):
    part = plan.part(made(NAME).to("meta"))
    with pl.attach(part, torch.optim.SGD(part.parameters(), lr=0.1)):
        pass


def test_a_placed_model_is_refused_on_a_gpu():
    plan = planned(NAME, 2)
    with pytest.raises(
        pl.UsageError, match=r"^Placed models train on the CPU: move the model there with model\.cpu\(\)"
    ):
        pl.launch(partial(elsewhere, plan), workers=2, plan=plan)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layout": "tensor(line=2)"}, "takes no layout"),
        ({"algorithm": "all-reduce"}, "does not train replicas of a placed model"),
    ],
)
def test_a_part_is_refused_beside_a_layout_or_an_algorithm(given, message):
    part = planned(NAME, 1).part(made(NAME))
    with pytest.raises(pl.UsageError, match=message):
        pl.attach(part, torch.optim.SGD(part.parameters(), lr=0.1), **given)


def test_a_worker_that_is_slow_on_purpose_is_slow_to_the_end_of_its_backward_pass():
    part, slept = planned(NAME, 1).part(made(NAME)), []
    part.connect(Exchange(None, 0, slowness=3.0, sleep=slept.append))
    out = part(data(NAME)[:BATCH][0])
    assert len(slept) == 1, "for the forward pass"
    out.sum().backward()
    assert len(slept) == 2, "though nothing was sent or received"
    assert min(slept) > 0
