"""`average=`: what is evaluated is the moving average of parameters and BatchNorm's statistics, also after a resumption."""

import pytest
import torch

import paceline as pl
from contracts.runs import run_task
from contracts.table import Row
from paceline.data.plan import BatchPlan
from paceline.tasks.load import load_task

TASK = """
import torch
from torch import nn
from paceline.tasks import Task, load_task

def task():
    def model():
        return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    return Task(name="normed", model=model, datasets=load_task("digits-mlp").datasets, batch_size=16)
"""
STEPS, DECAY, RATE = 60, 0.9, 0.5


@pytest.fixture
def task(tmp_path):
    (tmp_path / "tasks.py").write_text(TASK)
    return f"{tmp_path}/tasks.py:task"


def averaged_by_hand(name, *, batches_per_step, decay=DECAY, steps=STEPS):
    """Test loss with averaged parameters and statistics, and with the newest; gradients are means over several batches."""
    task = load_task(name)
    (inputs, targets), test = task.load()[0].tensors, task.load()[1]
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    plan = BatchPlan(num_samples=len(inputs), batch_size=16)
    state = model.state_dict()
    average = {key: value.clone() for key, value in state.items()}
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for number in range((step - 1) * batches_per_step, step * batches_per_step):
            indices = plan.indices(number)
            (task.loss(model(inputs[indices]), targets[indices]) / batches_per_step).backward()
        optimizer.step()
        share = min(decay, (1 + step) / (10 + step))
        for key, value in model.state_dict().items():
            if value.is_floating_point():
                average[key].lerp_(value, 1 - share)
    newest = task.evaluate(model, test)["loss"]
    model.load_state_dict(average)
    return task.evaluate(model, test)["loss"], newest


@pytest.mark.filterwarnings("ignore::paceline.errors.OverrideWarning")
@pytest.mark.parametrize("apply", ["user", "sgd", "delayed(delay=constant(updates_late=0), rule=user)"])
@pytest.mark.parametrize("simulated", [False, True])
def test_a_lone_worker_is_evaluated_on_its_average(task, apply, simulated):
    expected, newest = averaged_by_hand(task, batches_per_step=1)
    assert abs(expected - newest) > 0.01 * newest
    settings = {"algorithm": f"parameter-server(apply={apply}, average={DECAY})", "workers": 1, "steps": STEPS}
    train = pl.simulate_task if simulated else pl.train
    run = train(pl.TrainConfig(task=task, learning_rate=RATE, **settings))
    assert run.result["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert run.result["evaluated"] == "moving average of parameters and buffers, decay 0.9"


@pytest.mark.parametrize(("shards", "backend"), [(1, "processes"), (2, "threads"), (3, "simulator")])
def test_servers_average_what_they_hold(task, shards, backend):
    """Without BatchNorm's statistics, whose order among workers is a matter of timing, the average is exact."""
    settings = {"workers": 2, "steps": STEPS, "batch_size": 8, "learning_rate": 0.1}
    spec = f"parameter-server(shards={shards}, average={DECAY})"
    if backend == "simulator":
        run = pl.simulate_task(pl.TrainConfig(task="digits-mlp", algorithm=spec, **settings))
        again = pl.simulate_task(pl.TrainConfig(task=task, algorithm=spec, **settings))
    else:
        run, again = (
            pl.train(pl.TrainConfig(task=name, algorithm=spec, backend=backend, **settings))
            for name in ("digits-mlp", task)
        )
    newest = pl.simulate_task(
        pl.TrainConfig(task="digits-mlp", algorithm=f"parameter-server(shards={shards})", **settings)
    )
    assert run.result["test_loss"] == pytest.approx(average_of_digits(), rel=1e-4)
    assert abs(run.result["test_loss"] - newest.result["test_loss"]) > 1e-3
    assert again.result["test_accuracy"] > 0.5  # statistics and parameters that fit each other


def average_of_digits():
    task = load_task("digits-mlp")
    (inputs, targets), test = task.load()[0].tensors, task.load()[1]
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = BatchPlan(num_samples=len(inputs), batch_size=8)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(1, STEPS + 1):
        indices = torch.cat([plan.indices(2 * step - 2), plan.indices(2 * step - 1)])
        optimizer.zero_grad()
        task.loss(model(inputs[indices]), targets[indices]).backward()
        optimizer.step()
        for one, parameter in zip(average, model.parameters(), strict=True):
            one.lerp_(parameter.detach(), 1 - min(DECAY, (1 + step) / (10 + step)))
    with torch.no_grad():
        for one, parameter in zip(average, model.parameters(), strict=True):
            parameter.copy_(one)
    return task.evaluate(model, test)["loss"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_run_goes_on_with_the_average(workers, tmp_path):
    """A decay close to 1: an average that began anew would show."""
    settings = {"workers": workers, "learning_rate": 0.02}
    row, other = (Row(pl.ParameterServer(average=0.999, shards=shards)) for shards in (1, 2))
    straight, _ = run_task(row, epochs=3, **settings)
    run_task(row, epochs=2, out=tmp_path, **settings)
    resumed, _ = run_task(other if workers > 1 else row, epochs=3, resume=tmp_path, **settings)
    assert resumed.result["test_loss"] == pytest.approx(straight.result["test_loss"], rel=1e-4)
    fresh, _ = run_task(Row(pl.ParameterServer()), epochs=3, **settings)
    assert abs(fresh.result["test_loss"] - straight.result["test_loss"]) > 1e-2


@pytest.mark.parametrize("average", [0.0, 1.0, -1.0, float("nan")])
def test_impossible_decays(average):
    with pytest.raises(pl.UsageError, match="above 0 and below 1"):
        pl.ParameterServer(average=average)


def test_a_loop_of_ones_own_evaluates_by_itself():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(pl.UsageError, match="AveragedModel"):
        pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm="parameter-server(average=0.9)")
