"""Sparse gradients in rounds of real workers, however they were started, against one process."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

import paceline as pl
from algorithms.table_reference import Loop
from free_ports import free_port
from paceline.membership.join_point import JoinPoint
from processes.join_programs import CONTEXT, DEADLINE_S, free_address
from rounds import SPECS, run_task

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

IN_ROUNDS = ["lockstep", "all-reduce"]
BY_TWO = "sparse adam and adamw"


def check(loop, workers, numbers=()):
    """`numbers`: of workers, by epoch."""
    expected = loop.alone(*(numbers or [workers]))
    results = [torch.load(loop.folder / f"{worker}.pt") for worker in range(workers)]
    for found in results:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(*pair) for pair in zip(found[0], results[0][0], strict=True))


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
@pytest.mark.parametrize(
    ("optimizer", "workers", "options"),
    [(BY_TWO, 1, {}), (BY_TWO, 2, {"clip": 0.1}), ("adagrad", 3, {}), ("momentum", 2, {"infinite": 3})],
)
def test_launched(algorithm, optimizer, workers, options, tmp_path):
    options = {} if algorithm == "lockstep" and "clip" in options else options
    loop = Loop(optimizer, 24, folder=tmp_path, **options)
    pl.launch(loop, workers=workers, algorithm=algorithm)
    check(loop, workers)


def work(loop, algorithm, environment):
    os.environ.update(environment)
    torch.set_num_threads(1)
    pl.attach = partial(pl.attach, algorithm=algorithm)
    loop()


def started(loop, algorithm, environments):
    processes = [CONTEXT.Process(target=work, args=(loop, algorithm, one)) for one in environments]
    try:
        for one in processes:
            one.start()
        for one in processes:
            one.join(DEADLINE_S)
        assert [one.exitcode for one in processes] == [0] * len(processes)
    finally:
        for one in processes:
            one.kill()
            one.join()


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
@pytest.mark.parametrize("workers", [2, 3])
def test_joined(algorithm, workers, tmp_path):
    loop = Loop(BY_TWO, 24, folder=tmp_path)
    environment = {"PACELINE_JOIN": free_address(), "PACELINE_OF": str(workers), "PACELINE_DEADLINE_S": "590"}
    point = JoinPoint(environment["PACELINE_JOIN"], None, DEADLINE_S)
    try:
        started(loop, algorithm, [environment] * workers)
    finally:
        point.close()
    check(loop, workers)


def test_under_torchrun(tmp_path):
    loop = Loop(BY_TWO, 24, folder=tmp_path)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    started(loop, "all-reduce", [common | {"RANK": str(rank)} for rank in range(2)])
    check(loop, 2)


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
@pytest.mark.parametrize(("optimizer", "workers"), [(BY_TWO, 3), ("nesterov", 1), ("adagrad", 2)])
def test_resumed(algorithm, optimizer, workers, tmp_path):
    """Perhaps with another number of workers, whose batches are others."""
    loop = Loop(optimizer, 24, folder=tmp_path)
    pl.launch(loop, workers=3, algorithm=algorithm, out=tmp_path / "run")
    pl.launch(replace(loop, epochs=2), workers=workers, algorithm=algorithm, resume=tmp_path / "run")
    check(loop, workers, numbers=[3, workers])


TASK = """
from dataclasses import replace
from functools import partial

import torch

import paceline as pl
from algorithms.server.test_sparse_gradients import Recommender, batches


def task():
    samples = torch.cat(batches(20)), torch.randn(120, generator=torch.Generator().manual_seed(5))
    return pl.Task(
        name="pairs",
        model=partial(Recommender, {}, dtype=torch.float64),
        datasets=lambda _: (torch.utils.data.TensorDataset(samples[0], samples[1].double()),) * 2,
        loss=torch.nn.functional.mse_loss,
        accuracy=None,
        batch_size=7,
    )
"""


@pytest.mark.parametrize("algorithm", [*IN_ROUNDS, "local-sgd(warmup_steps=4)"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("workers", [1, 3])
def test_tasks(algorithm, optimizer, workers, tmp_path, monkeypatch):
    monkeypatch.setitem(SPECS, "adagrad", {"optimizer": "adagrad", "learning_rate": 0.1})
    models = []
    for sparse in (False, True):
        (tmp_path / f"{sparse}.py").write_text(TASK.replace("{}", str(sparse)))
        name = f"{tmp_path}/{sparse}.py:task"
        models.append(run_task(algorithm, optimizer, name, workers, "threads")[1])
    torch.testing.assert_close(models[1], models[0], rtol=1e-12, atol=1e-12)
