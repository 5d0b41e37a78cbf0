"""A step that was begun and gets no gradient: the loop's end leaves the others as they should be."""

import threading

import pytest
import torch

import paceline as pl
from loops import families
from loops.coder import batches, loss_of, made, own_id

GOSSIP = ["d-psgd", "d-psgd(topology=exponential)", "ad-psgd", "local-sgd(period=3)"]


class Mover(torch.nn.Module):
    """Its gradient is minus what it is called with, whatever its parameter."""

    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, by):
        return -(self.x * by).sum()


def moves(number, batches_of=None, skips_last=()):
    """Worker i moves its model by 1 + i in every step."""

    def loop():
        model = Mover()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pl.attach(model, optimizer) as worker:
            given = range(number) if batches_of is None else worker.batches([torch.zeros(1)] * batches_of)
            for step, _ in enumerate(given, start=1):
                optimizer.zero_grad()
                model(torch.tensor(1.0 + own_id())).backward()
                if not (step == number and own_id() in skips_last):
                    optimizer.step()
        return model.x.detach().clone()

    return loop


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("algorithm", GOSSIP)
def test_the_mean_of_all_models_changes_by_the_gradients_alone(algorithm, workers):
    run = pl.simulate(moves(7), workers=workers, algorithm=algorithm)
    for x in run.returned.values():
        torch.testing.assert_close(x, torch.full((2,), 7 * (1 + workers) / 2, dtype=torch.float64))


@pytest.mark.parametrize("algorithm", GOSSIP)
def test_a_skipped_last_step_loses_its_gradient_and_nothing_else(algorithm):
    """Asynchronous workers may have other numbers of batches: here they have 4 each, as all are equally fast."""
    run = pl.simulate(moves(4, batches_of=12, skips_last=[1]), workers=3, algorithm=algorithm)
    for x in run.returned.values():
        torch.testing.assert_close(x, torch.full((2,), (4 * 1 + 3 * 2 + 4 * 3) / 3, dtype=torch.float64))


def test_ad_psgd_averages_once_more_after_the_last_gradient():
    run = pl.simulate(moves(1), workers=2, algorithm="ad-psgd")
    assert run.result["consensus_distance"] < 1e-9  # 2.0 as single gradients leave them


@pytest.mark.parametrize("algorithm", families.ALL)
def test_launched_workers_end_too(algorithm):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer):
            for x in batches(9):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()

    run = pl.launch(loop, workers=2, algorithm=algorithm, backend="threads")
    assert run.result["outcome"] == "stopped"
    assert run.result["samples"] == 2 * 9 * 4
    assert run.result["records_lost"] == 0


@pytest.mark.parametrize("by_parts", [True, False])
@pytest.mark.parametrize("algorithm", families.ALL)
def test_the_run_s_end_reaches_a_loop_without_batches(algorithm, by_parts):
    """It would never end by itself."""
    left, both_are_in = threading.Semaphore(0), threading.Barrier(2)

    def loop():
        model, optimizer = made(lr=0.01)
        x = batches(1)[0]
        with pl.attach(model, optimizer):
            both_are_in.wait()  # a worker that comes when the run is over never enters
            while True:
                optimizer.zero_grad()
                (loss_of(model, x) if by_parts else model(x).square().mean()).backward()
                optimizer.step()
        left.release()

    run = pl.launch(loop, workers=2, algorithm=algorithm, backend="threads", limit_samples=100)
    assert run.result["outcome"] == "stopped"
    assert run.result["samples"] >= 100
    assert left.acquire(timeout=0)
    assert left.acquire(timeout=0)


def launched(loop, algorithm):
    return pl.launch(loop, workers=2, algorithm=algorithm, backend="threads")


def simulated(loop, algorithm):
    return pl.simulate(loop, workers=2, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "d-psgd"])
@pytest.mark.parametrize("start", [launched, simulated])
def test_a_lockstep_loop_that_ends_early_is_named(algorithm, start):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer):
            for x in batches(3 + 2 * own_id()):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()

    with pytest.raises(pl.WorkerLostError, match=r"worker 0|0 \("):
        start(loop, algorithm)


@pytest.mark.parametrize("algorithm", ["parameter-server", "parameter-server(mode=async)", "hogwild", "ad-psgd"])
def test_elsewhere_the_others_go_on(algorithm):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer):
            for x in batches(3 + 2 * own_id()):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()

    assert pl.simulate(loop, workers=2, algorithm=algorithm).result["samples"] == 4 * 8
    assert pl.launch(loop, workers=2, algorithm=algorithm, backend="threads").result["samples"] == 4 * 8
