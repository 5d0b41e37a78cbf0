"""`inject_staleness`: every gradient is applied as late as it was asked for, in the parameters and in the records."""

import itertools

import numpy as np
import pytest
import torch

import paceline as pl
from contracts.runs import flat, run_task
from contracts.table import Row
from paceline.algorithms.server.adagrad import Adagrad
from paceline.algorithms.server.delay import ConstantDelay, RecordedDelay
from paceline.data.plan import BatchPlan
from paceline.records.run_data import RunData
from paceline.specs.registry import build_optimizer
from paceline.tasks.load import load_task

BATCHES = 180  # of an epoch of the digits
FLOAT64_TASK = """
import torch
from paceline.tasks import Task, load_task

def task():
    digits = load_task("digits-mlp")
    def datasets(data):
        return tuple(torch.utils.data.TensorDataset(one.tensors[0].double(), one.tensors[1]) for one in digits.datasets(data))
    return Task(name="float64", model=lambda: digits.model().double(), datasets=datasets, batch_size=8)
"""


def delayed_by_hand(task, delays, steps, optimizer="sgd", **arguments):
    """Gradient n is applied in step n + delays(n), by torch's own optimizer, the one that is due longest first."""
    inputs, targets = task.load()[0].tensors
    torch.manual_seed(0)
    model = task.model()
    optimizer = build_optimizer(optimizer, list(model.parameters()), 0.05, **arguments)
    plan = BatchPlan(num_samples=len(inputs), batch_size=8)
    waiting = []  # (step in which it is due, number, gradients)
    for step in range(steps):
        indices = plan.indices(step)
        optimizer.zero_grad()
        task.loss(model(inputs[indices]), targets[indices]).backward()
        waiting.append((step + delays(step), step, [parameter.grad.clone() for parameter in model.parameters()]))
        waiting.sort(key=lambda one: one[:2])
        while waiting and waiting[0][0] <= step:
            for parameter, gradient in zip(model.parameters(), waiting.pop(0)[2], strict=True):
                parameter.grad = gradient
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def staleness_in_order(run):
    rows = np.concatenate(list(run.records.values()))
    rows = rows[rows["applied_version"] > 0]
    rows = rows[np.lexsort((rows["read_version"], rows["applied_version"]))]
    return (rows["applied_version"] - 1 - rows["read_version"]).tolist()


def final(model, x):
    """A flat vector (P,) without its padding, in the order of the model's parameters."""
    from paceline.optim.flat import FlatBinding

    binding = FlatBinding(model.parameters())
    return torch.cat([view.flatten() for view in binding.views(x)])


@pytest.mark.parametrize(
    ("optimizer", "arguments"), [("sgd", {}), ("sgd(weight_decay=0.001)", {"momentum": 0.9}), ("adamw", {})]
)
@pytest.mark.parametrize("algorithm", [pl.Sequential(), pl.ParameterServer(mode=pl.Async())])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_constant_delay_is_the_hand_written_loop_bit_for_bit(algorithm, optimizer, arguments, dtype, tmp_path):
    name = "digits-mlp"
    if dtype == "float64":
        (tmp_path / "tasks.py").write_text(FLOAT64_TASK)
        name = f"{tmp_path}/tasks.py:task"
    task = load_task(name)
    settings = {"task": name, "steps": 100, "learning_rate": 0.05, "inject_staleness": 6, "optimizer": optimizer}
    run, parameters = run_task(Row(algorithm), batch_size=8, **settings, **arguments)
    x = final(task.model(), parameters.x)
    assert x.dtype == getattr(torch, dtype)
    assert torch.equal(x, delayed_by_hand(task, lambda n: 6, 100, optimizer, **arguments))
    assert staleness_in_order(run) == [6] * 94
    assert run.result["staleness"]["histogram"] == {"6": 94}
    assert (run.result["dropped_updates"], run.result["computed_gradients"], run.result["version"]) == (6, 100, 100)
    assert run.result["inject_staleness"] == "constant(updates_late=6)"


def test_without_delay_it_is_plain_training():
    row = Row(pl.Sequential())
    assert torch.equal(run_task(row, steps=60, inject_staleness=0)[1].x, run_task(row, steps=60)[1].x)


@pytest.mark.parametrize("simulated", [False, True])
def test_recorded_delays_and_several_at_once(simulated):
    delays = RecordedDelay.of([3, 1, 1, 0, 7, 0])
    settings = {"algorithm": "sequential", "workers": 1, "steps": 60, "learning_rate": 0.05}
    settings["inject_staleness"] = "recorded(delays=3_1_1_0_7_0)"
    if simulated:
        run = pl.simulate_task(pl.TrainConfig(**settings))
    else:
        del settings["algorithm"]
        run, parameters = run_task(Row(pl.Sequential()), **settings)
        task = load_task("digits-mlp")
        assert torch.equal(final(task.model(), parameters.x), delayed_by_hand(task, delays.updates, 60))
    (rows,) = run.records.values()
    assert rows["read_version"].tolist() == list(range(60))
    due = [n + delays.updates(n) + 1 for n in range(60)]
    assert rows["applied_version"].tolist() == [version if version <= 60 else -1 for version in due]


def test_the_ramp_grows_over_the_first_epochs():
    settings = {"steps": 2 * BATCHES, "inject_staleness": "20", "staleness_ramp_epochs": 1.5}
    run, parameters = run_task(Row(pl.Sequential()), learning_rate=0.05, **settings)
    expected = ConstantDelay(updates_late=20, ramp_updates=270)
    task = load_task("digits-mlp")
    assert torch.equal(final(task.model(), parameters.x), delayed_by_hand(task, expected.updates, 2 * BATCHES))
    seen = staleness_in_order(run)
    assert (seen[0], seen[-1]) == (0, 20)
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(seen))
    assert seen.count(20) == 2 * BATCHES - 270 - 20


@pytest.mark.parametrize("backend", ["processes", "simulator"])
@pytest.mark.parametrize(("mode", "shards"), [("sync", 2), ("async", 1)])
def test_servers_add_it_to_what_workers_have_by_themselves(mode, shards, backend):
    spec = f"parameter-server(mode={mode}, shards={shards})"
    settings = {"algorithm": spec, "workers": 3, "steps": 40, "inject_staleness": 5}
    train = pl.train if backend == "processes" else pl.simulate_task
    run = train(pl.TrainConfig(**settings, **({"backend": backend} if backend == "processes" else {})))
    seen = staleness_in_order(run)
    if mode == "sync":
        assert set(seen) == {5}
        assert run.result["staleness"]["mean"] == 5
        assert len(seen) == 3 * (40 - 5)
    else:
        assert min(seen) >= 5
        assert np.mean(seen) <= 5 + 3 * 3
        assert backend == "processes" or np.mean(seen) > 5  # real ones that do all in turn have none by themselves
        assert len(seen) == 3 * 40 - 5
    assert run.result["outcome"] == "stopped"


@pytest.mark.parametrize(
    "algorithm", [pl.Sequential(), pl.ParameterServer(mode=pl.Async()), pl.ParameterServer(apply=Adagrad())]
)
def test_a_resumed_run_goes_on_with_what_waited(algorithm, tmp_path):
    row, settings = Row(algorithm), {"optimizer": "adamw", "learning_rate": 0.002, "inject_staleness": 9}
    _, straight = run_task(row, epochs=3, **settings)
    run_task(row, epochs=2, out=tmp_path, **settings)
    with pytest.raises(pl.UsageError, match="only be resumed with that"):
        run_task(row, epochs=3, resume=tmp_path, **(settings | {"inject_staleness": 8}))
    resumed, parameters = run_task(row, epochs=3, out=tmp_path, resume=tmp_path, **settings)
    assert torch.equal(parameters.x, straight.x)
    assert parameters.version == straight.version == 3 * BATCHES
    assert resumed.result["computed_gradients"] == 3 * BATCHES
    assert resumed.result["dropped_updates"] == 9  # what waited at the end of the first part was applied in the second
    assert resumed.result["steps"] == 3 * BATCHES - 9
    for one in (resumed, RunData.load(tmp_path)):
        (rows,) = one.records.values()
        assert rows["applied_version"].tolist() == [*range(10, 3 * BATCHES + 1), *[-1] * 9]


def test_servers_go_on_with_what_waited(tmp_path):
    settings = {"inject_staleness": 9, "workers": 2, "learning_rate": 0.05}
    one, two = (Row(pl.ParameterServer(shards=shards)) for shards in (1, 2))
    _, straight = run_task(one, epochs=4, **settings)
    run_task(one, epochs=2, out=tmp_path, **settings)
    _, parameters = run_task(two, epochs=4, resume=tmp_path, **settings)
    torch.testing.assert_close(parameters.x, straight.x, rtol=1e-3, atol=1e-4)


def loop(delay):
    """A loop of the user's own, alone; the parameters that it is left with."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(40, 4, 6, generator=torch.Generator().manual_seed(1))
    with pl.attach(model, optimizer, algorithm=f"sequential(delay={delay})") as worker:
        for batch in worker.batches(list(x)):
            optimizer.zero_grad()
            (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    return flat(model)


def test_a_loop_of_ones_own_may_have_late_gradients_but_one_step():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    waiting = []
    for batch in torch.randn(40, 4, 6, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        waiting.append([parameter.grad.clone() for parameter in model.parameters()])
        if len(waiting) > 3:
            for parameter, gradient in zip(model.parameters(), waiting.pop(0), strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert torch.equal(loop("constant(updates_late=3)"), flat(model))
    with pytest.raises(pl.UsageError, match="calls step once"):
        loop("recorded(delays=1_0)")


BAD = [
    ({"algorithm": "hogwild", "inject_staleness": 5}, "use sequential, or, with several workers, parameter-server"),
    ({"algorithm": "all-reduce", "inject_staleness": 5}, "cannot be injected into this algorithm: use sequential"),
    ({"inject_staleness": -1}, "0 updates or more, not -1"),
    ({"inject_staleness": "20.5"}, "Unknown delay '20.5'"),
    ({"inject_staleness": "random(highest=-2)"}, "highest of RandomDelay must be 0 or more, not -2"),
    ({"inject_staleness": "randon(highest=2)"}, "Did you mean 'random'"),
    ({"staleness_ramp_epochs": 3}, "needs staleness to inject: add --inject-staleness"),
    ({"inject_staleness": 3, "staleness_ramp_epochs": 0}, "staleness_ramp_epochs must be a number above 0, not 0"),
    ({"inject_staleness": 3, "staleness_ramp_epochs": float("nan")}, "must be a number above 0, not nan"),
    (
        {"inject_staleness": "constant(updates_late=2, ramp_updates=9)", "staleness_ramp_epochs": 1},
        "already has a ramp",
    ),
    ({"algorithm": "sequential(delay=constant(updates_late=2))", "inject_staleness": 2}, "already has a delay"),
    (
        {"algorithm": "parameter-server(apply=adaptive-revision(revision_state=snapshot))", "inject_staleness": 2},
        "use revision_state=echo",
    ),
]


@pytest.mark.parametrize(("settings", "says"), BAD, ids=[says for _, says in BAD])
@pytest.mark.parametrize("train", [pl.train, pl.simulate_task])
def test_what_cannot_be_delayed(train, settings, says):
    with pytest.raises(pl.UsageError, match=says) as raised:
        train(pl.TrainConfig(**{"algorithm": "sequential", "workers": 1, "steps": 5, **settings}))
    raised.value.__traceback__ = None


def test_a_run_without_data_has_no_epochs_to_ramp_over():
    config = pl.TrainConfig(algorithm="sequential", workers=1, steps=5, inject_staleness=2, staleness_ramp_epochs=1)
    with pytest.raises(pl.UsageError, match="ramp_updates=500"):
        pl.simulate_task(config, timing_only=True, num_parameters=100)
    config = pl.TrainConfig(
        algorithm="sequential", workers=1, steps=50, inject_staleness="constant(updates_late=4, ramp_updates=20)"
    )
    run = pl.simulate_task(config, timing_only=True, num_parameters=100)
    assert run.result["staleness"]["max"] == 4
