"""Training functions that go wrong, for `launch`; they are found by name in worker processes."""

import contextlib
import os
import signal
import subprocess
import sys
from functools import partial

import torch
from torch import nn

import leftovers
import paceline as pl
from loops import coder
from paceline.membership.environment import current_environment


def pieces(inputs=4):
    model, draw = nn.Linear(inputs, 1), torch.Generator().manual_seed(0)  # threads share the global one
    data = torch.utils.data.TensorDataset(torch.randn(64, inputs, generator=draw), torch.randn(64, 1, generator=draw))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)


def worker_id():
    return current_environment().worker_id


def loop(model, optimizer, loader, algorithm=None, epochs=1, report=False):
    with pl.attach(model, optimizer, algorithm=algorithm) as worker:
        for _ in range(epochs):
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                if report:
                    worker.report(loss)
                optimizer.step()
    return model


class FailsInWorker1:
    """A loop with momentum in which worker 1 raises an error at a step, unless there is a file that says it has.

    Args:
        algorithm: spec.
        folder: for that file.
        never: it does not.
        accumulates: whether a step has two batches; the worker fails with the first.
        searches: whether LBFGS makes the steps; the worker fails in its third evaluation of the closure.
    """

    def __init__(self, algorithm, folder, *, never=False, accumulates=False, searches=False):
        self.algorithm, self.done, self.never = algorithm, folder / "has failed", never
        self.accumulates, self.searches = accumulates, searches

    def __call__(self):
        torch.manual_seed(0)
        model, _, loader = pieces()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if self.searches:
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        with pl.attach(model, optimizer, algorithm=self.algorithm) as worker:
            for epoch in range(2):
                for number, (x, y) in enumerate(worker.batches(loader)):
                    self._step(model, optimizer, x, y, (worker.worker_id, epoch, number))

    def _step(self, model, optimizer, x, y, place):
        is_first = self.accumulates and place[2] % 2 == 0
        evaluations = 0

        def closure():
            nonlocal evaluations
            evaluations += 1
            if is_first or not self.accumulates:
                optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if place == (1, 1, 4) and evaluations == 1 + 2 * self.searches and not (self.never or self.done.exists()):
                self.done.touch()
                raise KeyError("label 17")
            return loss

        if self.searches:
            optimizer.step(closure)
        else:
            closure()
            if not is_first:
                optimizer.step()


def plain():
    return loop(*pieces())


def names_locked():
    loop(*pieces(), algorithm="locked")


def names_lockstep():
    loop(*pieces(), algorithm="lockstep", epochs=2)


def two_shapes():
    loop(*pieces(inputs=4 + worker_id()))


def exits_before_attach():
    os._exit(2)


def fails_before_attach():
    if worker_id() == 1:
        raise ValueError("the data are not where I thought")
    loop(*pieces())


def fails_in_the_middle():
    model, optimizer, loader = pieces()
    with pl.attach(model, optimizer) as worker:
        for number, (x, y) in enumerate(worker.batches(loader)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if number == 3:
                raise KeyError("label 17")


def fails_in_the_optimizer():
    model, _, loader = pieces()

    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError("no step today")

    loop(model, Broken(model.parameters(), lr=0.1), loader)


def diverges():
    model, _, loader = pieces()
    loop(model, torch.optim.SGD(model.parameters(), lr=1e30), loader, epochs=100, report=True)


def diverges_silently():
    model, _, loader = pieces()
    loop(model, torch.optim.SGD(model.parameters(), lr=1e30), loader, epochs=100)


def never_attaches():
    return None


def exits():
    raise SystemExit(3)


def exits_when_trained():
    plain()
    sys.exit(0)


def exits_while_training():
    model, optimizer, loader = pieces()
    with pl.attach(model, optimizer) as worker:
        for x, y in worker.batches(loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            sys.exit()


def is_interrupted_by_itself():
    plain()
    raise KeyboardInterrupt


def is_stopped(for_s=None):
    """Worker 1 is stopped at its fourth batch: for `for_s` seconds, or for good, and worker 0 waits until the run ends."""
    model, optimizer, loader = pieces()
    waker = None
    with pl.attach(model, optimizer) as worker:
        for number, (x, y) in enumerate(worker.batches(loader)):
            if number == 3 and worker.worker_id == 1:
                if for_s is not None:
                    waker = subprocess.Popen(["sh", "-c", f"sleep {for_s}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            if number == 4 and worker.worker_id == 0 and for_s is None:
                leftovers.wait_until(worker._membership.stopped, "the run's end")
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if waker is not None:
        waker.wait()


class _Impatient(torch.optim.LBFGS):
    """Evaluates its closure once more on worker 1."""

    def step(self, closure):
        if worker_id() == 1:
            closure()
        return super().step(closure)


def minimizes_by_a_line_search(kind=torch.optim.LBFGS):
    """LBFGS with five batches for three workers, against LBFGS with a round's batches as one."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin()

    def train(kind, batches):
        model = nn.Linear(4, 1).double()
        for parameter in model.parameters():  # threads share the generators
            nn.init.constant_(parameter, 0.1)
        optimizer = kind(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

        def closure(x_i, y_i):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x_i), y_i)
            loss.backward()
            return loss

        with contextlib.ExitStack() as stack:
            for batch in batches(stack, model, optimizer):
                optimizer.step(partial(closure, *batch))
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    expected = train(torch.optim.LBFGS, lambda *_: [(x[:24], y[:24]), (x[24:], y[24:])])
    rows = list(zip(x.split(8), y.split(8), strict=True))
    found = train(kind, lambda stack, *attached: stack.enter_context(pl.attach(*attached)).batches(rows))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-10)


def minimizes_unequally():
    minimizes_by_a_line_search(_Impatient)


def returns_its_model():
    return loop(*pieces())


def ends_early():
    """In lockstep, worker 0 does one epoch and the others two."""
    loop(*pieces(), epochs=1 if worker_id() == 0 else 2)


def reports_after_the_step():
    model, optimizer, loader = pieces()
    with pl.attach(model, optimizer) as worker:
        for x, y in worker.batches(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            worker.report(loss)


def skips_the_last_step():
    model, optimizer, loader = pieces()
    with pl.attach(model, optimizer) as worker:
        for number, (x, y) in enumerate(worker.batches(loader)):
            if number == 31:
                continue
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


def breaks_out_of_epochs():
    model, optimizer, loader = pieces()
    with pl.attach(model, optimizer) as worker:
        for _ in range(3):
            for number, (x, y) in enumerate(worker.batches(loader)):
                if number == 5:
                    break
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()


def attaches_twice():
    plain()
    plain()


def calls_parts(folder):
    """Draws its own batches, and leaves its model in a file."""
    model, optimizer = coder.made()
    with pl.attach(model, optimizer):
        for x in coder.batches(20):
            optimizer.zero_grad()
            coder.loss_of(model, x).backward()
            optimizer.step()
    torch.save(coder.vector(model), f"{folder}/{worker_id()}.pt")


def exits_in_the_middle():
    """Without a word: as a crash within a library would end it."""
    model, optimizer, loader = pieces()
    with pl.attach(model, optimizer) as worker:
        for _ in worker.batches(loader):
            worker.sum(1.0)  # neither waits for the other from here on
            os._exit(3 + worker_id())


def two_optimizers(folder):
    """Draws its own batches, and leaves its model in a file."""
    torch.save(coder.together(), f"{folder}/{worker_id()}.pt")


def two_optimizers_by_epochs(folder, epochs):
    """Leaves its model in a file."""
    model, _ = coder.made()
    optimizers = coder.halves(model)
    with pl.attach(model, optimizers) as worker:
        for _ in range(epochs):
            coder.train_together(model, optimizers, worker.batches(coder.batches(4, worker=0)))
    torch.save(coder.vector(model), f"{folder}/{worker_id()}.pt")
