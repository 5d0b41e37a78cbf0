"""The user's loop under `all-reduce`: two workers are one with twice the batch, whatever the loop does with its gradients."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl

BATCHES = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(k)), torch.arange(6) % 3) for k in range(16)]


def make(learning_rate=0.5):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)


def clipped(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def plain_step(model, optimizer):
    optimizer.step()


def reference(step, batches_per_step):
    """Plain training on so many batches as one."""
    model, optimizer = make()
    for first in range(0, len(BATCHES), batches_per_step):
        some = BATCHES[first : first + batches_per_step]
        x, y = torch.cat([x for x, _ in some]), torch.cat([y for _, y in some])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        step(model, optimizer)
    return [p.detach().clone() for p in model.parameters()]


def run(algorithm, train, workers=2):
    """`train(worker)`'s results by worker."""
    results, lock = {}, threading.Lock()

    def loop():
        with lock:  # they seed a generator that all threads share
            model, optimizer = make()
        with pl.attach(model, optimizer) as worker:
            train(worker, model, optimizer)
        with lock:
            results[worker.worker_id] = [p.detach().clone() for p in model.parameters()]

    pl.launch(loop, workers=workers, algorithm=algorithm, backend="threads")
    for other in results.values():
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    return results[0]


@pytest.fixture(params=[1, 1 << 20], ids=["a bucket per parameter", "one bucket"], name="launched")
def _launched(request):
    return partial(run, pl.AllReduce(bucket_bytes=request.param))


@pytest.mark.parametrize("step", [plain_step, clipped])
def test_two_workers_are_one_with_twice_the_batch(step, launched):
    def train(worker, model, optimizer):
        for x, y in worker.batches(BATCHES):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            step(model, optimizer)

    torch.testing.assert_close(launched(train), reference(step, 2))


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "not marked"])
def test_accumulated_gradients(marked, launched):
    def train(worker, model, optimizer):
        for number, (x, y) in enumerate(worker.batches(BATCHES), start=1):
            loss = nn.functional.cross_entropy(model(x), y) / 2
            if number % 2 and marked:
                with worker.accumulate():
                    loss.backward()
            else:
                loss.backward()
            if number % 2 == 0:
                clipped(model, optimizer)
                optimizer.zero_grad()

    torch.testing.assert_close(launched(train), reference(clipped, 4))


def test_samples_that_the_loop_tells_are_those_of_one_step():
    """All further steps count their batches' samples again, those of every pass."""

    def loop():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for number, (x, _) in enumerate(worker.batches(BATCHES), start=1):
                loss = model(x).mean()
                loss.backward()
                if number % 2 == 0:
                    worker.report(loss, samples=5 if number == 2 else None)
                    optimizer.step()
                    optimizer.zero_grad()

    run = pl.launch(loop, workers=2, algorithm="all-reduce", backend="threads")
    assert [rows["samples"].tolist() for rows in run.records.values()] == 2 * [[5, 12, 12, 12]]


def test_every_pass_marked_sends_with_the_step(launched):
    def train(worker, model, optimizer):
        for x, y in worker.batches(BATCHES):
            optimizer.zero_grad()
            with worker.accumulate():
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    torch.testing.assert_close(launched(train), reference(plain_step, 2))


def test_a_loop_that_fetches_its_batches_itself(launched):
    def train(worker, model, optimizer):
        for x, y in BATCHES[worker.worker_id :: 2]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    torch.testing.assert_close(launched(train), reference(plain_step, 2))


def test_a_worker_without_a_batch_takes_part(launched):
    """16 batches on 3 workers: in the last round, two have none. This loop clears its gradients after the step."""

    def train(worker, model, optimizer):
        for _ in range(2):
            for x, y in worker.batches(BATCHES):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    def big():
        model, optimizer = make()
        for _ in range(2):
            for first in range(0, 16, 3):
                some = BATCHES[first : first + 3]
                x, y = torch.cat([x for x, _ in some]), torch.cat([y for _, y in some])
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(launched(train, workers=3), big())


def test_a_step_that_all_skip_hangs_nobody(launched):
    """One worker's gradient is infinite: everybody's mean is, and GradScaler skips on all."""
    skipped = []

    def train(worker, model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6)
        for number, (x, y) in enumerate(worker.batches(BATCHES)):
            optimizer.zero_grad()
            factor = float("inf") if number == 3 and worker.worker_id == 1 else 1.0
            scaler.scale(nn.functional.cross_entropy(model(x), y) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        skipped.append(scaler.get_scale())

    found = launched(train)
    assert skipped == [4.0, 4.0]
    model, optimizer = make()
    for first in [0, 2, 4, 8, 10, 12, 14]:
        some = BATCHES[first : first + 2]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.cat([x for x, _ in some])), torch.cat([y for _, y in some])).backward()
        optimizer.step()
    torch.testing.assert_close(found, [p.detach() for p in model.parameters()])
