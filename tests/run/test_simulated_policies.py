"""What simulated workers of the user's own loop share, and what each keeps: as on real workers."""

import sys
import threading

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.simulator import Cluster

WORKERS = 3
BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(number)) for number in range(18)]


def normalised():
    """Trains a model with BatchNorm; its buffers' address, how many batches they have seen, and how many this worker had."""
    with LOCK:  # worker threads share torch's generator
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    statistics, steps = model[1], 0
    with pl.attach(model, optimizer) as worker:
        for x in worker.batches(BATCHES):
            if not steps:
                MEETING.wait(60)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            steps += 1
        # Inside: on leaving, all have worker 0's.
        tracked, mean = statistics.num_batches_tracked.item(), statistics.running_mean.clone()
        SEEN[worker.worker_id] = statistics.running_mean.data_ptr(), tracked, steps, mean


SEEN = {}
LOCK = threading.Lock()
ALONE = MEETING = threading.Barrier(1)  # lets everybody through


def on_threads(algorithm, monkeypatch):
    """All workers have their first batch before one of them makes a step: a fast one would take them all."""
    monkeypatch.setattr(sys.modules[__name__], "MEETING", threading.Barrier(WORKERS))
    SEEN.clear()
    pl.launch(normalised, workers=WORKERS, algorithm=algorithm, backend="threads")
    return dict(SEEN)


def on_simulated_workers(algorithm, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "MEETING", ALONE)
    SEEN.clear()
    pl.simulate(normalised, workers=WORKERS, algorithm=algorithm)
    return dict(SEEN)


@pytest.mark.parametrize("run", [on_threads, on_simulated_workers])
@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "d-psgd"])
def test_in_lockstep_every_worker_keeps_its_own_buffers(algorithm, run, monkeypatch):
    seen = run(algorithm, monkeypatch)
    assert [tracked for _, tracked, _, _ in seen.values()] == [len(BATCHES) / WORKERS] * WORKERS
    assert len({address for address, *_ in seen.values()}) == WORKERS
    assert not torch.equal(seen[0][3], seen[1][3])


@pytest.mark.parametrize("algorithm", ["leashed", "ad-psgd"])
def test_otherwise_all_workers_write_the_same_buffers(algorithm, monkeypatch):
    """On real workers one memory mapped by all, so counts may be lost; the policy is the same."""
    seen = on_simulated_workers(algorithm, monkeypatch)
    assert len({address for address, *_ in seen.values()}) == 1
    assert (
        max(tracked for _, tracked, _, _ in seen.values())
        == len(BATCHES)
        == sum(steps for *_, steps, _ in seen.values())
    )
    real = on_threads(algorithm, monkeypatch)
    assert max(tracked for _, tracked, _, _ in real.values()) > max(steps for *_, steps, _ in real.values())


TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Task


def normalised():
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return Task(
        name="normalised", model=lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)),
        datasets=lambda folder: (data, data), loss=nn.functional.mse_loss, accuracy=None, batch_size=4, learning_rate=0.05,
        epochs=2,
    )
"""


@pytest.mark.parametrize(("algorithm", "tracked"), [("lockstep", 8), ("d-psgd", 8), ("leashed", 24), ("ad-psgd", 24)])
def test_the_runs_buffers_are_worker_0s_in_lockstep_and_all_workers_otherwise(
    algorithm, tracked, tmp_path, monkeypatch
):
    """2 epochs of 12 batches on 3 workers, evaluated with the buffers of the run."""
    from paceline.worker.evaluator import Evaluator

    seen, now = [], Evaluator.now

    def noting(self, *arguments):
        evaluation = now(self, *arguments)
        seen.append(self.model[1].num_batches_tracked.item())
        return evaluation

    monkeypatch.setattr(Evaluator, "now", noting)
    file = tmp_path / "task.py"
    file.write_text(TASK)
    pl.simulate_task(pl.TrainConfig(task=f"{file}:normalised", algorithm=algorithm, workers=WORKERS))
    assert seen[-1] == tracked


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@pytest.mark.parametrize("collective", ["ring", "tree", "memory"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_all_reduce_equals_plain_bit_for_bit(name, collective):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
        optimizer = OPTIMIZERS[name](model.parameters())
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches(BATCHES[:-1]):  # not times 3: one worker has no batch in the last round
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach(), optimizer.state_dict()["state"]

    cluster = Cluster(workers=WORKERS, collective=collective).slow(worker=2, factor=3)
    plain = pl.simulate(train, cluster=cluster, algorithm="all-reduce")
    sharded = pl.simulate(train, cluster=cluster, algorithm="all-reduce(sharded=true)")
    assert sharded.result["samples"] == 4 * (len(BATCHES) - 1)
    for worker in range(WORKERS):
        (x, state), (expected_x, expected_state) = sharded.returned[worker], plain.returned[worker]
        assert torch.equal(x, expected_x)
        assert state.keys() == expected_state.keys()
        for index, one in expected_state.items():
            for key, value in one.items():
                assert torch.equal(torch.as_tensor(state[index][key]), torch.as_tensor(value))
    assert torch.equal(plain.returned[0][0], plain.returned[1][0])


def test_operations_in_memory_take_the_time_of_lockstep():
    """Started and blocking operations move the same bytes between the same barriers; `all-reduce` divides its sums itself."""
    waits_s = {}
    for algorithm in ("lockstep", "all-reduce"):
        cluster = Cluster(workers=WORKERS, collective="memory")
        config = pl.TrainConfig(task="digits-mlp", algorithm=algorithm, workers=WORKERS, steps=5)
        run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=1_000_000)
        waits_s[algorithm] = run.result["wall_s"]
    divided_s = 5 * 2 * 4e6 / 10e9  # in each step a vector is read and written, in a core's memory
    assert waits_s["all-reduce"] == pytest.approx(waits_s["lockstep"] + divided_s, rel=0.001)
