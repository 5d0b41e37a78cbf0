"""Launched workers whose models count as ones on a device, and share the host's memory."""

import contextlib
import os
import signal
import threading

import pytest
import torch
from torch import nn

import paceline as pl
import paceline.worker.memberships.memory
from contracts.runs import run_function
from lazy_copies import LazyCopies, MetaCopies, MetaValues
from paceline.transport import device
from processes.survivors import Survivors

DILOCO = "diloco(period=4, fragments=2, delay=1)"
SYNC = "parameter-server(mode=sync(backups=0), shards=2)"
BATCHES = [torch.randn(8, 5, generator=torch.Generator().manual_seed(n)) for n in range(24)]


class Loop:
    """A model with running statistics; worker 1's first process may die.

    Args:
        copies: of the stand-in for a GPU; None: the model is on the CPU.
    """

    def __init__(self, copies=None, dies_at=None, evaluates=False, algorithm=None):
        self.copies, self.dies_at, self.evaluates, self.algorithm = copies, dies_at, evaluates, algorithm

    def after_step(self, model):
        """Nothing."""

    def evaluate(self, model):
        statistics = float(model[1].num_batches_tracked)
        return {"accuracy": float(threading.current_thread() is not threading.main_thread()), "loss": statistics}

    def __call__(self):
        device, values = torch.device("cpu"), contextlib.nullcontext()
        if self.copies is not None:
            copies = self.copies()
            paceline.worker.memberships.memory.device_copies = lambda _: copies
            device, values = copies.device, MetaValues() if copies.device.type == "meta" else values
        with values:
            self.train(device)

    def train(self, device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        steps = 0
        evaluate = self.evaluate if self.evaluates else None
        with pl.attach(model, optimizer, algorithm=self.algorithm, evaluate=evaluate) as worker:
            assert worker.device == device
            for x in worker.batches(BATCHES, device=worker.device):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                self.after_step(model)
                worker.report(loss)
                steps += 1
                if self.dies_at == steps and worker.worker_id == 1 and not worker._membership.incarnation:
                    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_with_models_on_a_device_ends_as_one_on_the_cpu():
    ends = [run_function(Loop(copies), workers=2, algorithm=SYNC) for copies in (None, LazyCopies)]
    assert [run.result["steps"] for run, _ in ends] == [len(BATCHES) / 2] * 2
    (_, on_cpu), (_, on_device) = ends
    assert torch.equal(on_cpu.x, on_device.x)
    assert on_device.buffers["buffer 1.num_batches_tracked"] == 12  # worker 0's


@pytest.mark.parametrize("method", ["lockstep", "all-reduce"])
def test_a_replacement_in_rounds_of_gradients(method, tmp_path):
    program = Survivors(tmp_path, {1: 2}, method, newcomers={4: {1: 1}}, optimizer="adam", copies=LazyCopies)
    run = pl.launch(program, workers=3, restarts=1)
    assert run.result["restarts"] == 1
    first, *others = program.models(range(3))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    for name, value in program.replayed(program.counted(run.records)).items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "local-sgd(period=2)", DILOCO])
def test_no_operation_of_averages_has_vectors_of_a_device_and_of_the_host(algorithm):
    """Worker 1 is killed, and worker 0 waits for its replacement."""
    run = pl.launch(Loop(MetaCopies, dies_at=3), workers=2, algorithm=algorithm, restarts=1, min_workers=2)
    assert run.result["outcome"] == "stopped"
    assert run.result["restarts"] == 1


@pytest.mark.parametrize("algorithm", ["hogwild", "locked(kind=rwlock)", "leashed"])
def test_no_operation_on_one_vector_that_all_share_has_either(algorithm):
    run = pl.launch(Loop(MetaCopies, dies_at=3), workers=2, algorithm=algorithm, restarts=1)
    assert run.result["outcome"] == "stopped"
    assert run.result["restarts"] == 1


@pytest.mark.parametrize("algorithm", ["hogwild", "locked", "leashed"])
def test_one_worker_on_a_device_makes_the_updates_of_the_cpu(algorithm):
    (_, on_cpu), (_, on_device) = (
        run_function(Loop(copies), workers=1, algorithm=algorithm) for copies in (None, LazyCopies)
    )
    torch.testing.assert_close(on_device.x, on_cpu.x, rtol=1e-5, atol=1e-6)  # updates are added as differences
    assert on_device.buffers["buffer 1.num_batches_tracked"] == 24


class Counting:
    """Two workers whose gradients are 1 everywhere, so that the run's model tells how many updates it contains."""

    def __call__(self):
        copies = LazyCopies()
        paceline.worker.memberships.memory.device_copies = lambda _: copies
        model = nn.Linear(40, 40)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pl.attach(model, optimizer) as worker:
            for _ in worker.batches([torch.zeros(1)] * 200):
                optimizer.zero_grad()
                sum(parameter.sum() for parameter in model.parameters()).backward()
                optimizer.step()


@pytest.mark.parametrize("algorithm", ["locked", "leashed"])
def test_no_update_from_a_device_is_lost(algorithm):
    run, end = run_function(Counting(), workers=2, algorithm=algorithm)
    assert run.result["steps"] == 200
    assert {float(one) for one in end.x} == {0.0, -200.0}  # 0.0: padding


class Interrupted(torch.optim.SGD):
    """While it steps, another worker adds 1 to all parameters."""

    shared: torch.Tensor

    def step(self, closure=None):
        self.shared.add_(1.0)
        return super().step(closure)


class Raced(Counting):
    def __call__(self):
        copies = LazyCopies()
        paceline.worker.memberships.memory.device_copies = lambda _: copies
        model = nn.Linear(3, 2)
        initial = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = Interrupted(model.parameters(), lr=0.5)
        with pl.attach(model, optimizer) as worker:
            optimizer.shared = worker._membership.arena.shared.x
            for _ in worker.batches([torch.zeros(1)] * 4):
                optimizer.zero_grad()
                sum(parameter.sum() for parameter in model.parameters()).backward()
                optimizer.step()
        for before, parameter in zip(initial, model.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach(), before + 2.0)


def test_an_update_from_a_device_leaves_what_others_have_added_meanwhile():
    assert pl.launch(Raced(), workers=1, algorithm="hogwild").result["steps"] == 4


@pytest.mark.parametrize("algorithm", ["d-psgd", "ad-psgd"])
def test_no_operation_of_neighbours_has_either(algorithm):
    assert pl.launch(Loop(MetaCopies), workers=2, algorithm=algorithm).result["outcome"] == "stopped"


@pytest.mark.parametrize(
    "algorithm",
    [
        *(SYNC, "parameter-server(mode=async, codec=top-k)", "parameter-server(mode=bounded(clock_bound=1), shards=2)"),
        *("parameter-server(mode=ringmaster(threshold=4))", "adaptive-revision"),
        *("parameter-server(mode=async, durability=replica)", "downpour(fetch=2, push=3)"),
        "downpour(push=2, codec=qsgd, apply=momentum)",
    ],
)
def test_no_operation_has_vectors_of_a_device_and_of_the_host(algorithm):
    run = pl.launch(Loop(MetaCopies), workers=2, algorithm=algorithm)
    assert run.result["outcome"] == "stopped"
    assert run.result["samples"] > 100  # a mode may have dropped late gradients


class SparseLoop(Loop):
    """An embedding with sparse gradients."""

    def train(self, device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(40, 3, sparse=True), nn.Linear(3, 1)).to(device)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for rows in worker.batches([torch.tensor([n % 7, n]) for n in range(24)], device=device):
                optimizer.zero_grad()
                model(rows).square().mean().backward()
                optimizer.step()


def test_rows_of_a_device_travel_as_those_of_the_cpu():
    ends = [run_function(SparseLoop(copies), workers=2, algorithm=SYNC)[1] for copies in (None, LazyCopies)]
    assert torch.equal(ends[0].x, ends[1].x)


def test_a_worker_on_a_device_is_replaced_and_the_batches_are_all_trained_on():
    algorithm = "parameter-server(mode=sync(backups=0), on_death=wait)"
    run = pl.launch(Loop(LazyCopies, dies_at=3), workers=2, restarts=1, algorithm=algorithm)
    assert run.result["outcome"] == "stopped"
    assert run.result["restarts"] == 1
    assert run.result["steps"] >= len(BATCHES) / 2 - 1


def test_evaluations_are_made_beside_worker_0_with_its_statistics():
    """A forked process could not use the GPU."""
    run = pl.launch(Loop(LazyCopies, evaluates=True), workers=2, algorithm=SYNC, evaluate_every_samples=16)
    assert run.evaluations
    assert {one["test_accuracy"] for one in run.evaluations} == {1.0}
    assert run.evaluations[-1]["test_loss"] > 0.0
    assert run.result["outcome"] == "stopped"


def test_each_worker_has_a_gpu_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def seen(worker, named=None):
        if named is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        return device.gpu_of(worker).get("CUDA_VISIBLE_DEVICES")

    assert [seen(worker) for worker in range(4)] == ["0", "1", "0", "1"]
    assert [seen(worker, "5,GPU-8f,7") for worker in range(4)] == ["5", "GPU-8f", "7", "5"]
    assert (seen(1, "3"), seen(1, "")) == (None, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert seen(1) is None


class Statistics(Loop):
    """Two epochs; worker 1 dies in the second, and notes how many batches its replacement's statistics have seen at first."""

    def __init__(self, folder):
        super().__init__(LazyCopies)
        self.folder = folder

    def train(self, device):
        model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            seen = int(model[0].num_batches_tracked)
            (self.folder / f"{worker.worker_id}-{worker._membership.incarnation}-{seen}").touch()
            for epoch in range(2):
                for x in worker.batches(BATCHES):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                    if epoch and worker.worker_id == 1 and not worker._membership.incarnation:
                        os.kill(os.getpid(), signal.SIGKILL)


def test_a_replacement_begins_with_statistics_of_worker_0(tmp_path):
    run = pl.launch(Statistics(tmp_path), workers=2, algorithm="lockstep", restarts=1, min_workers=2)
    assert run.result["restarts"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"0-0-0", "1-0-0", f"1-1-{len(BATCHES) // 2}"}


class Clamping(Loop):
    """Changes the parameters after each update, as weight clipping does, and also after the last."""

    def after_step(self, model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.25, 0.25)


@pytest.mark.parametrize("algorithm", ["lockstep", "local-sgd(period=2)"])
def test_what_a_loop_changes_after_its_last_update_is_the_runs(algorithm):
    ends = [run_function(Clamping(copies), workers=2, algorithm=algorithm)[1] for copies in (None, LazyCopies)]
    assert torch.equal(ends[0].x, ends[1].x)
    assert float(ends[1].x.abs().max()) <= 0.25


class ToldItsGpu(Loop):
    """Writes what its process had as `CUDA_VISIBLE_DEVICES`."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def after_step(self, model):
        (self.folder / os.environ["CUDA_VISIBLE_DEVICES"]).touch()


def test_launched_workers_begin_with_a_gpu_each(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    pl.launch(ToldItsGpu(tmp_path), workers=2, algorithm="lockstep")
    assert {path.name for path in tmp_path.iterdir()} == {"5", "7"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,7"
