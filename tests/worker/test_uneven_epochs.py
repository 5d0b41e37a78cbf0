"""Epochs whose last round has fewer batches than workers, under every method that goes in rounds, against plain PyTorch.

The loop of a worker without a batch gets its last batch again, whose gradient weighs nothing: the worker makes the others'
update where all have one model, and no step at all where it has one of its own. Momentum, Adam's count of steps and weight
decay then stay as they are.
"""

import contextlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import paceline as pl
from contracts.runs import run_function
from rounds import (
    EPOCHS,
    OPTIMIZERS,
    OWN_MODELS,
    SHARED_MODEL,
    Loop,
    backward,
    in_order,
    made,
    reference,
    run_loop,
    run_task,
    shuffled,
    task_file,
)

ORDERS = ["clear, backward, step", "backward, step, clear", "backward, step, zero"]


def check(algorithm, num_batches, workers, run, models, expected):
    for model in models:
        torch.testing.assert_close(model, expected, rtol=1e-4, atol=1e-5)
    rounds, gradients = EPOCHS * -(-num_batches // workers), EPOCHS * num_batches
    assert run.result["samples"] == EPOCHS * (2 * num_batches - 1)
    assert run.result["steps"] == (rounds if algorithm in SHARED_MODEL else gradients)
    assert run.result["computed_gradients"] == gradients
    assert run.result["dropped_updates"] == 0
    assert [len(own) for own in run.records.values()] == [rounds] * workers
    if algorithm in OWN_MODELS:
        per_worker = [EPOCHS * len(range(worker, num_batches, workers)) for worker in range(workers)]
        assert run.result["updates_per_worker"] == per_worker


def check_loop(algorithm, optimizer, num_batches, workers, order, backend):
    run, models = run_loop(algorithm, Loop(optimizer, num_batches, order), workers, backend)
    expected, _ = reference(algorithm, optimizer, [in_order(num_batches)] * EPOCHS, workers)
    check(algorithm, num_batches, workers, run, models, expected)


def check_task(algorithm, optimizer, num_batches, workers, backend, folder):
    run, model = run_task(algorithm, optimizer, task_file(folder, num_batches), workers, backend)
    expected, _ = reference(algorithm, optimizer, shuffled(num_batches), workers)
    check(algorithm, num_batches, workers, run, [list(model)], expected)


cases = {
    "algorithm": st.sampled_from(SHARED_MODEL + OWN_MODELS),
    "optimizer": st.sampled_from(["sgd", "momentum", "adamw"]),
    "size": st.tuples(st.sampled_from([1, 2, 3, 5, 7, 11, 13]), st.sampled_from([1, 2, 3, 5])).filter(
        lambda size: size[0] >= size[1]  # with fewer, a worker is told that it will never get a batch
    ),
}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(**cases, order=st.sampled_from(ORDERS))
@example("d-psgd", "momentum", (3, 2), ORDERS[0])
@example("local-sgd(period=2)", "adamw", (7, 3), ORDERS[0])
@example("local-sgd(period=3, warmup_steps=2)", "momentum", (7, 5), ORDERS[0])
def test_simulated_loops_equal_the_reference(algorithm, optimizer, size, order):
    check_loop(algorithm, optimizer, *size, order, "simulator")


@pytest.mark.soak
@settings(max_examples=500, deadline=None, derandomize=True)
@given(**cases, order=st.sampled_from(ORDERS))
def test_many_simulated_loops_do(algorithm, optimizer, size, order):
    check_loop(algorithm, optimizer, *size, order, "simulator")


@pytest.mark.parametrize(("order", "optimizer"), [*zip(ORDERS, ["momentum", "adamw", "sgd"], strict=True)])
@pytest.mark.parametrize("algorithm", SHARED_MODEL + OWN_MODELS)
def test_loops_of_real_workers_equal_the_reference(algorithm, order, optimizer):
    check_loop(algorithm, optimizer, 7, 3, order, "threads")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(**cases)
@example("d-psgd", "adamw", (3, 2))
@example("local-sgd(period=2)", "momentum", (7, 3))
def test_simulated_tasks_equal_the_reference(tmp_path_factory, algorithm, optimizer, size):
    check_task(algorithm, optimizer, *size, "simulator", tmp_path_factory.mktemp("task"))


@pytest.mark.soak
@settings(max_examples=500, deadline=None, derandomize=True)
@given(**cases)
def test_many_simulated_tasks_do(tmp_path_factory, algorithm, optimizer, size):
    check_task(algorithm, optimizer, *size, "simulator", tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("algorithm", SHARED_MODEL + OWN_MODELS)
def test_tasks_of_real_workers_equal_the_reference(algorithm, optimizer, tmp_path):
    check_task(algorithm, optimizer, 7, 3, "threads", tmp_path)


class Unit(nn.Module):
    """A model with one weight, whose gradient is the input."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return (self.w * x).sum()


@pytest.mark.parametrize("algorithm", ["d-psgd", "local-sgd"])
@pytest.mark.parametrize("backend", ["threads", "simulator"])
def test_three_unit_gradients_on_two_workers(algorithm, backend):
    final = []

    def loop():
        model = Unit()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.ones(1)] * 3):
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
        final.append(model.w.item())

    if backend == "threads":
        run, parameters = run_function(loop, workers=2, algorithm=algorithm, backend="threads")
        assert parameters.x.unique().tolist() == [-1.5, 0.0]  # 0: padding
    else:
        run = pl.simulate(loop, workers=2, algorithm=algorithm)
        assert final == [-1.5, -1.5]
    assert run.result["steps"] == run.result["samples"] == 3


def test_a_batch_whose_length_cannot_be_told_weighs_as_much_as_the_others():
    """It counted as none: the mean was zero, and no worker ever moved."""

    def loop():
        model = Unit()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pl.attach(model, optimizer) as worker:
            for text in worker.batches(["a", "b", "c"]):
                optimizer.zero_grad()
                model(torch.tensor(float(ord(text) - 96))).backward()
                optimizer.step()
        return model.w.item()

    assert pl.simulate(loop, workers=2, algorithm="lockstep").returned == {0: -4.5, 1: -4.5}


class ChangingLoop(Loop):
    """A loop that clips its gradients, and with a scaler leaves out what overflows; the loss of one batch is infinite."""

    def __init__(self, *about, bad, scaled, epochs):
        super().__init__(*about)
        self.bad, self.scaled, self.epochs, self.scales = bad, scaled, epochs, {}

    def __call__(self):
        model = made()
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6, enabled=self.scaled)
        with pl.attach(model, optimizer) as worker:
            for _ in range(self.epochs):
                for x, y in worker.batches(in_order(self.num_batches)):
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    factor = float("inf") if self.bad is not None and torch.equal(x, self.bad) else 1.0
                    scaler.scale(loss * factor).backward()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    scaler.step(optimizer)
                    scaler.update()
        with self.lock:
            self.models[worker.worker_id] = [p.detach().clone() for p in model.parameters()]
            self.scales[worker.worker_id] = scaler.get_scale()


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(
    ("scaled", "bad", "epochs"),
    [(False, None, EPOCHS), (True, None, EPOCHS), (True, 1, EPOCHS), (True, 6, EPOCHS)],  # 6: the last round's
)
def test_all_loops_clip_and_scale_the_mean_of_the_last_round_alike(optimizer, scaled, bad, epochs):
    batches = in_order(7)
    loop = ChangingLoop(
        optimizer, 7, "", bad=batches[bad][0] if bad is not None else None, scaled=scaled, epochs=epochs
    )
    run, _ = run_loop("all-reduce", loop, 3, "threads")
    model = made()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(epochs):
        for first in (0, 3, 6):
            if bad is None or bad not in range(first, first + 3):
                stepper.zero_grad()
                backward(model, batches[first : first + 3])
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                stepper.step()
    for worker in range(3):
        torch.testing.assert_close(loop.models[worker], [p.detach() for p in model.parameters()], rtol=1e-4, atol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(loop.models[0], loop.models[worker], strict=True))
    if scaled:
        assert loop.scales == dict.fromkeys(range(3), 8.0 if bad is None else 8.0 / 2**epochs)
    assert run.result["samples"] == epochs * 13


def at_last(batches):
    """Two epochs, with a step at every second batch and at an epoch's last one."""
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches, start=1):
            yield batch, number % 2 == 0 or number == len(batches)


def across_epochs(batches):
    """The batches of all epochs in one row, with a step at every second one."""
    rows = (batch for _ in range(EPOCHS) for batch in batches)
    for number, batch in enumerate(rows, start=1):
        yield batch, number % 2 == 0


def accumulated(batches, workers, habit):
    """A worker's gradient is that of its batches since the last step, and weighs as much as the samples that are its own."""
    model, rounds = made(), -(-len(batches) // workers)
    dealt = [
        [batches[min(r * workers + w, (r - (r * workers + w >= len(batches))) * workers + w)] for r in range(rounds)]
        for w in range(workers)
    ]
    stepper = OPTIMIZERS["momentum"](model.parameters())
    waiting, weights, numbers = [[] for _ in dealt], [0] * workers, [0] * workers
    for of_round in zip(*(habit(own) for own in dealt), strict=True):
        for worker, (batch, _) in enumerate(of_round):
            waiting[worker].append(batch)
            place = numbers[worker] % rounds * workers + worker
            weights[worker] += len(batch[1]) * (place < len(batches))
            numbers[worker] += 1
        if not of_round[0][1]:
            continue
        stepper.zero_grad()
        for own, weight in zip(waiting, weights, strict=True):
            for x, y in own:
                (nn.functional.cross_entropy(model(x), y) / 2 * weight / sum(weights)).backward()
        stepper.step()
        waiting, weights = [[] for _ in dealt], [0] * workers
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("habit", [at_last, across_epochs])
@pytest.mark.parametrize("num_batches", [12, 13, 14, 15, 16])
@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "all-reduce(sharded=true)"])
def test_gradients_accumulate_over_an_uneven_epoch(algorithm, num_batches, habit):
    ends = []

    def loop():
        model = made()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        with pl.attach(model, optimizer) as worker:
            for (x, y), is_due in habit(worker.batches(in_order(num_batches))):
                with worker.accumulate() if not is_due else contextlib.nullcontext():
                    (nn.functional.cross_entropy(model(x), y) / 2).backward()
                if is_due:
                    optimizer.step()
                    optimizer.zero_grad()
        ends.append([p.detach().clone() for p in model.parameters()])

    run = pl.simulate(loop, workers=2, algorithm=algorithm)
    for one in ends:
        torch.testing.assert_close(one, accumulated(in_order(num_batches), 2, habit), rtol=1e-4, atol=1e-5)
    assert run.result["samples"] == EPOCHS * (2 * num_batches - 1) - leftover(num_batches, habit)


def leftover(num_batches, habit):
    """Samples after the last step."""
    rounds = EPOCHS * -(-num_batches // 2)
    return 0 if habit is at_last or rounds % 2 == 0 else 2 * num_batches - 1 - 4 * (-(-num_batches // 2) - 1)


@pytest.mark.parametrize("algorithm", [*SHARED_MODEL, "local-sgd(period=2)"])
def test_all_loops_call_worker_mean_equally_often(algorithm):
    """A worker that had no batch in the last round took the others' loss of that round for what it asked for next."""
    lasts = []

    def loop():
        model = made()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with pl.attach(model, optimizer) as worker:
            batches = worker.batches(in_order(7))
            for x, y in batches:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                assert worker.mean(loss) < 100
            lasts.append((len(batches), worker.mean(100 + worker.worker_id)))

    pl.simulate(loop, workers=3, algorithm=algorithm)
    assert lasts == [(3, 101)] * 3
