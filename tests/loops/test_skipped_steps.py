"""A step that some workers leave out, and others do not: refused on all workers where they go in rounds."""

from types import SimpleNamespace

import pytest
import torch

import paceline as pl
from loops import families
from loops.coder import batches, loss_of, made, own_id, vector
from paceline.algorithms.replacements import Replacements
from paceline.algorithms.round import Round
from paceline.algorithms.round_messages import Reports

IN_ROUNDS = [*families.SHARED_LOCKSTEP, *families.OWN_LOCKSTEP, "da-sgd(period=3)"]
WITHOUT_ROUNDS = [*families.ASYNCHRONOUS, "parameter-server(mode=async)", "downpour(push=3, fetch=2)"]
SAYS = "skipped (step 3|one of steps 1 to [34]) and went on to another batch"
NUMBER = 24


def trained(own, *, uses_batches=True, leaves_out=lambda number: False, before_backward=False, every=1):
    """One worker; returns its model."""
    model, optimizer = made()
    with pl.attach(model, optimizer) as worker:
        optimizer.zero_grad()
        for number, x in enumerate(worker.batches(own) if uses_batches else own, start=1):
            if before_backward and leaves_out(number):
                continue
            loss_of(model, x).backward()
            if leaves_out(number):
                optimizer.zero_grad()
                continue
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return vector(model)


def simulated(loop, algorithm, workers=2):
    models = {}

    def body():
        models[own_id()] = loop()

    return pl.simulate(body, workers=workers, algorithm=algorithm), models


def third_of_worker_1(number):
    return own_id() == 1 and number == 3


@pytest.mark.parametrize(
    ("workers", "before_backward"), [(2, True), (3, False)], ids=["before backward", "after backward"]
)
@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_one_worker_leaves_out_a_step(algorithm, workers, before_backward):
    def loop():
        return trained(batches(NUMBER, worker=0), leaves_out=third_of_worker_1, before_backward=before_backward)

    with pytest.raises(pl.UsageError, match=f"Worker 1 {SAYS}"):
        simulated(loop, algorithm, workers)


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_launched(algorithm):
    def loop():
        trained(batches(NUMBER, worker=0), leaves_out=third_of_worker_1)

    with pytest.raises(pl.UsageError, match=f"Worker 1 {SAYS}"):
        pl.launch(loop, workers=2, algorithm=algorithm, backend="threads")


@pytest.mark.parametrize("algorithm", ["all-reduce", "all-reduce(sharded=true)"])
def test_of_batches_of_its_own_a_step_that_the_mean_was_made_for(algorithm):
    """The others make an update with that mean, and this worker would leave it out."""
    with pytest.raises(pl.UsageError, match=f"Worker 1 {SAYS}"):
        simulated(lambda: trained(batches(9), uses_batches=False, leaves_out=third_of_worker_1), algorithm)


@pytest.mark.parametrize("algorithm", ["lockstep", "local-sgd(period=3)", "d-psgd", "da-sgd(period=3)"])
def test_of_batches_of_its_own_a_worker_may_leave_one_out(algorithm):
    """It makes as many steps as the others, each with a batch of its own: nothing tells that it drew one more."""

    def loop():
        return trained(batches(9 + own_id()), uses_batches=False, leaves_out=third_of_worker_1)

    run, models = simulated(loop, algorithm)
    assert run.result["outcome"] == "stopped"
    assert len(models) == 2


@pytest.mark.parametrize("leaves_out", [lambda number: number == 3, lambda number: number % 5 == 2])
@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_all_leave_out_the_same_steps(algorithm, leaves_out):
    run, models = simulated(lambda: trained(batches(NUMBER, worker=0), leaves_out=leaves_out), algorithm)
    assert run.result["outcome"] == "stopped"
    if algorithm in families.SHARED_LOCKSTEP:
        assert torch.equal(models[0], models[1])


@pytest.mark.parametrize(("uses_batches", "every"), [(True, 3), (False, 2)], ids=["batches", "own batches"])
@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_accumulation_is_no_skipped_step(algorithm, uses_batches, every):
    def loop():
        return trained(batches(NUMBER, worker=0 if uses_batches else None), uses_batches=uses_batches, every=every)

    run, _ = simulated(loop, algorithm)
    assert run.result["outcome"] == "stopped"


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "all-reduce(sharded=true)"])
def test_a_step_left_out_once_all_have_accumulated(algorithm):
    """After three passes there was a fourth once, and a step another time: each is expected only where it came last."""

    def loop():
        model, optimizer = made()
        passes = [4, 3, 3, 3]
        with pl.attach(model, optimizer):
            for step, number in enumerate(passes, start=1):
                optimizer.zero_grad()
                if step == 3 and own_id() == 1 and algorithm != "lockstep":
                    number += 3  # of the next step, as this one is not made
                for x in batches(number):
                    loss_of(model, x).backward()
                optimizer.step()

    if algorithm == "lockstep":
        assert simulated(loop, algorithm)[0].result["outcome"] == "stopped"
    else:
        with pytest.raises(pl.UsageError, match="Worker 1 skipped step 3 "):
            simulated(loop, algorithm)


@pytest.mark.parametrize("algorithm", WITHOUT_ROUNDS)
def test_without_rounds_every_worker_decides_by_itself(algorithm):
    run, models = simulated(lambda: trained(batches(NUMBER, worker=0), leaves_out=third_of_worker_1), algorithm)
    assert run.result["outcome"] == "stopped"
    assert len(models) == 2


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_one_worker_breaks_out_of_an_epoch(algorithm):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for _ in range(2):
                for number, x in enumerate(worker.batches(batches(NUMBER, worker=0)), start=1):
                    optimizer.zero_grad()
                    loss_of(model, x).backward()
                    optimizer.step()
                    if own_id() == 1 and number == 5:
                        break

    with pytest.raises(pl.UsageError, match="Worker 1 skipped"):
        simulated(loop, algorithm)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("algorithm", ["all-reduce", "all-reduce(sharded=true)", "lockstep"])
def test_a_step_left_out_in_a_round_in_which_another_worker_has_no_batch(algorithm, every):
    """Workers 0 and 1 have a batch in the last round of the epoch, and worker 2 has none."""

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for epoch in range(2):
                for number, x in enumerate(worker.batches(batches(8, worker=0)), start=1):
                    optimizer.zero_grad()
                    loss_of(model, x).backward()
                    if (number == 3 and own_id() == 1 and not epoch) or number % every:
                        continue
                    optimizer.step()

    with pytest.raises(pl.UsageError, match="skipped step"):
        simulated(loop, algorithm, workers=3)


class Board:
    """Collectives of workers that take their turns: each tells, and then all read."""

    def __init__(self, num_workers):
        self.told, self.members = [], range(num_workers)

    def start_all_reduce(self, vector):
        self.told.append(vector)
        return SimpleNamespace(wait=lambda: None)


def test_all_workers_are_told_the_same():
    board = Board(4)
    places = [(7, 6), (6, 6), (6, 6), (7, 6)]
    rounds = []
    for worker, (round_, step) in enumerate(places):
        replica = SimpleNamespace(round=round_, step=step, rates=0, closure=None)
        ports = SimpleNamespace(worker_id=worker, num_workers=4, incarnation=0, collectives=board, views=None)
        rounds.append(Round(replica, ports, Replacements(replica, ports)))
    total = Reports(sum(one.own_report().numbers for one in rounds))
    for one in rounds:
        with pytest.raises(pl.UsageError, match="Workers 0 and 3 skipped"):
            one.check(total)
