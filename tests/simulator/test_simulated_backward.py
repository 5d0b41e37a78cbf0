"""What a loop finds in its gradients once `backward` has returned: the same in a simulation as in a real run, bit for bit."""

import threading

import pytest
import torch
from torch import nn
from torch.autograd import backward as backward_by_name
from torch.utils.checkpoint import checkpoint

import paceline as pl

BATCHES = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(k)), torch.arange(6) % 3) for k in range(13)]


def make():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


class Loop:
    """A training loop of one worker; `seen` is what it found in its gradients, and left in its parameters."""

    batches = BATCHES  # with 2 and with 3 workers, some have no batch in the last round

    def __init__(self, worker, model, optimizer):
        self.worker, self.model, self.optimizer = worker, model, optimizer
        self.seen = []

    def look(self):
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self.model.parameters()])

    def run(self):
        for x, y in self.worker.batches(self.batches):
            self.optimizer.zero_grad()
            self.gradient(x, y)
            self.look()
            self.step()

    def gradient(self, x, y):
        loss_of(self.model, x, y).backward()

    def step(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()


class ClipsValues(Loop):
    def step(self):
        nn.utils.clip_grad_value_(self.model.parameters(), 0.01)
        self.optimizer.step()


class CallsAutograd(Loop):
    def gradient(self, x, y):
        torch.autograd.backward([loss_of(self.model, x, y), self.model(x).square().mean()])


class ImportedBackwardByName(Loop):
    def gradient(self, x, y):
        backward_by_name(loss_of(self.model, x, y))


class AsksForGradients(Loop):
    """Without any call of `backward`: all is handed out with the step, as there is nothing to see before."""

    def gradient(self, x, y):
        parameters = list(self.model.parameters())
        for parameter, found in zip(
            parameters, torch.autograd.grad(loss_of(self.model, x, y), parameters), strict=True
        ):
            parameter.grad = found

    def step(self):
        self.optimizer.step()


class Twice(Loop):
    batches = BATCHES[:12]  # a worker without a batch sends once

    def gradient(self, x, y):
        loss = loss_of(self.model, x, y)
        loss.backward(retain_graph=True)
        self.look()
        loss.backward()


class SomeParameters(Loop):
    def gradient(self, x, y):
        loss_of(self.model, x, y).backward(inputs=list(self.model.parameters())[2:])


class PenalisesGradients(Loop):
    def gradient(self, x, y):
        loss = loss_of(self.model, x, y)
        first = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True)
        (loss + 0.1 * sum(one.square().sum() for one in first)).backward()


class KeepsTheGraph(Loop):
    def gradient(self, x, y):
        loss_of(self.model, x, y).backward(create_graph=True)


class OtherModels(Loop):
    """Other models have backward passes of their own: before, after, and in the midst of the trained one's."""

    def gradient(self, x, y):
        other = nn.Linear(4, 1)

        class Nested(torch.autograd.Function):
            @staticmethod
            def forward(context, one):
                return one.clone()

            @staticmethod
            def backward(context, gradient):
                with torch.enable_grad():
                    other(x).sum().backward()
                return gradient

        other(x).square().mean().backward()
        loss_of(self.model, Nested.apply(x.requires_grad_()), y).backward()
        other(x.detach()).square().mean().backward()


class Accumulates(Loop):
    batches, marked = BATCHES[:12], False

    def run(self):
        for number, (x, y) in enumerate(self.worker.batches(self.batches), start=1):
            if number % 2 and self.marked:
                with self.worker.accumulate():
                    (loss_of(self.model, x, y) / 2).backward()
            else:
                (loss_of(self.model, x, y) / 2).backward()
            self.look()
            if number % 2 == 0:
                self.step()
                self.optimizer.zero_grad()


class MarksAccumulation(Accumulates):
    marked = True


class EveryPassMarked(Loop):
    def gradient(self, x, y):
        with self.worker.accumulate():
            loss_of(self.model, x, y).backward()

    def step(self):
        self.optimizer.step()


class Scales(Loop):
    """One worker's gradient is infinite in one round: under all-reduce everybody's mean is, and all skip that step."""

    def run(self):
        self.scaler, self.round = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6), 0
        super().run()
        self.seen.append([torch.tensor(self.scaler.get_scale())])

    def gradient(self, x, y):
        self.round += 1
        factor = float("inf") if self.round == 2 and self.worker.worker_id == 1 else 1.0
        self.scaler.scale(loss_of(self.model, x, y) * factor).backward()

    def step(self):
        self.scaler.unscale_(self.optimizer)
        self.look()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class FetchesByItself(Loop):
    def run(self):
        for x, y in BATCHES[self.worker.worker_id :: self.worker.num_workers][:4]:
            self.optimizer.zero_grad()
            self.gradient(x, y)
            self.look()
            self.step()


def seen_in(launch, kind, algorithm, workers):
    """By worker, everything that the loop saw, and its final parameters."""
    seen, lock = {}, threading.Lock()

    def train():
        with lock:  # real workers are threads here, and share PyTorch's generator
            model, optimizer = make()
        with pl.attach(model, optimizer) as worker:
            loop = kind(worker, model, optimizer)
            loop.run()
        seen[worker.worker_id] = [*loop.seen, [p.detach().clone() for p in model.parameters()]]

    launch(train, workers=workers, algorithm=algorithm)
    return seen


def launched(train, **named):
    return pl.launch(train, backend="threads", **named)


LOOPS = [
    Loop, ClipsValues, CallsAutograd, ImportedBackwardByName, AsksForGradients, Twice, SomeParameters, PenalisesGradients,
    KeepsTheGraph, OtherModels, Accumulates, MarksAccumulation, EveryPassMarked, Scales, FetchesByItself,
]  # fmt: skip


def check_equal(kind, algorithm, workers, *, at_the_end=True):
    """`at_the_end`: the model as well that the `with` leaves: where each has its own, a real worker looks when it is done."""
    simulated = seen_in(pl.simulate, kind, algorithm, workers)
    real = seen_in(launched, kind, algorithm, workers)
    assert simulated.keys() == real.keys() == set(range(workers))
    for worker, expected in real.items():
        assert len(simulated[worker]) == len(expected) > 3
        pairs = list(zip(simulated[worker], expected, strict=True))
        for number, (found, wanted) in enumerate(pairs if at_the_end else pairs[:-1]):
            for one, other in zip(found, wanted, strict=True):
                same = one is other if one is None or other is None else torch.equal(one, other)
                assert same or (one - other).isnan().all(), (worker, number, one, other)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.filterwarnings("ignore::paceline.errors.ClippingWarning")
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.__name__)
def test_all_reduce(kind, workers):
    check_equal(kind, "all-reduce(bucket_bytes=1)", workers)  # a bucket per parameter


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.filterwarnings("ignore::paceline.errors.ClippingWarning")
@pytest.mark.parametrize("kind", [Loop, Twice, Accumulates, Scales], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("algorithm", ["lockstep", "local-sgd(period=2)", "local-sgd(warmup_steps=2)"])
def test_methods_whose_loops_see_their_own_gradients(algorithm, kind):
    check_equal(kind, algorithm, 3, at_the_end=algorithm == "lockstep")


def test_clipping_acts_on_the_mean():
    """Two workers whose gradients are 3 and -1: clipped to 0.5 each they cancel out; their mean is 1, and clipped 0.5."""

    def train():
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.tensor([[3.0]]), torch.tensor([[-1.0]])]):
                optimizer.zero_grad()
                model(x).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        return model.weight.item()

    run = pl.simulate(train, workers=2, algorithm="all-reduce")
    assert [run.returned[worker] for worker in range(2)] == pytest.approx([-0.5, -0.5])


@pytest.mark.parametrize("run", [pl.simulate, launched], ids=["simulated", "real"])
def test_a_gradient_that_one_pass_completes_twice_is_refused(run):
    class Checkpointed(Loop):
        def gradient(self, x, y):
            hidden = self.model[1](self.model[0](x))
            output = checkpoint(self.model[2], hidden.detach().requires_grad_(), use_reentrant=True)
            (nn.functional.cross_entropy(output, y) + self.model[2](hidden).square().mean()).backward()

    with pytest.raises(pl.PacelineError, match="use_reentrant=False"):
        seen_in(run, Checkpointed, "all-reduce", 2)


def test_other_threads_may_train_meanwhile():
    """A backward pass of another thread that ends during a simulated worker's is none of the simulation's."""
    ends = []

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):  # the trained model's last layer has its gradient by now
            def other():
                nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
                ends.append(threading.get_ident())

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return gradient

    class Loop2(Loop):
        def gradient(self, x, y):
            hidden = Slow.apply(self.model[1](self.model[0](x)))
            nn.functional.cross_entropy(self.model[2](hidden), y).backward()

    seen = seen_in(pl.simulate, Loop2, "all-reduce", 2)
    assert ends
    assert torch.equal(seen[0][0][0], seen[1][0][0])


def test_backward_is_pytorchs_own_again_after_a_simulation():
    before = torch.autograd.backward, torch.autograd._engine_run_backward
    seen_in(pl.simulate, Loop, "all-reduce", 2)
    with pytest.raises(ZeroDivisionError):
        pl.simulate(lambda: 1 / 0, workers=2, algorithm="all-reduce")
    assert (torch.autograd.backward, torch.autograd._engine_run_backward) == before
