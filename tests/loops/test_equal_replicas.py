"""Replicas that a method keeps equal are compared: rounding is evened out with a warning, and anything else ends the run."""

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

import paceline as pl
from loops import families
from loops.coder import batches, loss_of, made, own_id, vector
from paceline.algorithms.merges import OuterStep
from paceline.algorithms.replacements import Replacements
from paceline.algorithms.round import Round
from paceline.algorithms.round_messages import Header, Heard
from paceline.ports.ports import NUM_NUMBERS

APART = r"At step (\d+) the workers' parameters differ, and this method keeps them equal"
RATES = r"At step (\d+) the workers' learning rates differ"
ROUNDED = "differ by rounding"
SHARED = ["lockstep", "all-reduce", "all-reduce(codec=qsgd(bits=4))"]
LATE = [
    "da-sgd(period=2)",
    "diloco(period=2)",
    "diloco(period=2, codec=qsgd(bits=4))",
    "local-sgd(period=2, codec=sign)",
]
LOCKSTEP = [*SHARED, "all-reduce(sharded=true)", *families.OWN_LOCKSTEP, *LATE]


class Descent(torch.optim.Optimizer):
    """SGD that changes each parameter once more."""

    def __init__(self, parameters, change, **defaults):
        super().__init__(parameters, defaults)
        self.change = change

    @torch.no_grad()
    def step(self, closure=None, changed_outside=False):
        for number, p in enumerate(self.param_groups[0]["params"]):
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            self.change(number, p)


def noisy(parameters, **options):
    """The generators of the workers draw apart."""
    return Descent(parameters, lambda _, p: p.add_(torch.randn_like(p), alpha=0.01), **options)


def on_worker_1(change):
    return lambda parameters, **options: Descent(parameters, change if own_id() else nothing, **options)


def nothing(*_):
    pass


def trained(
    optimizer=torch.optim.SGD, number=12, *, uses_batches=True, before_step=nothing, after_step=nothing, **kind
):
    model, _ = made()
    model.to(**kind)
    optimizer = optimizer(model.parameters(), lr=0.1)
    after_step = after_step(optimizer) if after_step is not nothing else nothing
    with pl.attach(model, optimizer) as worker:
        own = [x.to(**kind) for x in batches(number, worker=0 if uses_batches else None)]
        for step, x in enumerate(worker.batches(own) if uses_batches else own):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            before_step(model, x, step)
            optimizer.step()
            after_step(worker, loss)
    return vector(model)


def simulated(loop, algorithm, workers=2):
    return pl.simulate(loop, workers=workers, algorithm=algorithm).returned


def refused_at(loop, algorithm, says, **options):
    with pytest.raises(pl.UsageError, match=says) as caught:
        simulated(loop, algorithm, **options)
    return int(re.search(says, str(caught.value)).group(1))


def of_this_worker(model, x, step):
    """A term of the gradient that the mean does not have."""
    extra = torch.autograd.grad(loss_of(model, x), list(model.parameters()))
    for p, g in zip(model.parameters(), extra, strict=True):
        p.grad.add_(g)


def by_own_loss(optimizer):
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0 * own_id())
    return lambda worker, loss: scheduler.step(loss.item() * (1 + own_id()))


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("algorithm", SHARED)
def test_noise_in_a_step_ends_the_run(algorithm, workers):
    """The digests differ in the second mean."""
    step = refused_at(lambda: trained(noisy, 6 * workers), algorithm, APART, workers=workers)
    assert step == 2


@pytest.mark.parametrize("uses_batches", [True, False], ids=["batches", "own batches"])
@pytest.mark.parametrize("algorithm", SHARED[1:])
def test_a_gradient_of_this_worker_after_the_mean_ends_the_run(algorithm, uses_batches):
    loop = lambda: trained(before_step=of_this_worker, uses_batches=uses_batches)  # noqa: E731
    assert refused_at(loop, algorithm, APART) == 2


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "all-reduce(codec=qsgd(bits=4))"])
def test_perturbed_while_the_gradient_is_computed(algorithm):
    """Each worker by its own batch, and put back before the step: nobody looks meanwhile, however long it goes on."""

    def loop():
        model, optimizer = made()
        parameters = list(model.parameters())
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches(batches(80, worker=0)):
                before = [p.detach().clone() for p in parameters]
                with torch.no_grad():
                    for p in parameters:
                        p.add_(0.01 * x.mean())
                optimizer.zero_grad()
                loss_of(model, x).backward()
                with torch.no_grad():
                    for p, own in zip(parameters, before, strict=True):
                        p.copy_(own)
                optimizer.step()
        return vector(model)

    a, b = simulated(loop, algorithm).values()
    assert torch.equal(a, b)


def test_before_the_mean_it_is_part_of_it():
    with pytest.warns(pl.errors.ClippingWarning):
        a, b = simulated(lambda: trained(before_step=of_this_worker), "lockstep").values()
    assert torch.equal(a, b)


@pytest.mark.parametrize("algorithm", LOCKSTEP)
def test_a_plateau_of_ones_own_loss_ends_the_run(algorithm):
    refused_at(lambda: trained(number=48, after_step=by_own_loss), algorithm, RATES)


@pytest.mark.parametrize("algorithm", LOCKSTEP)
def test_a_plateau_of_the_mean_loss_does_not(algorithm):
    def by_mean_loss(optimizer):
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return lambda worker, loss: scheduler.step(worker.mean(loss.item()))

    assert len(simulated(lambda: trained(after_step=by_mean_loss), algorithm)) == 2


@pytest.mark.parametrize("algorithm", families.OWN_LOCKSTEP)
def test_schedules_by_the_progress_that_workers_with_models_of_their_own_see(algorithm):
    """It is counted in samples, and the workers' batches are of different sizes."""

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            scheduler = worker.follow(lr_scheduler.ExponentialLR(optimizer, 0.9), samples_per_step=4)
            for x in batches(12, size=4 + 4 * own_id()):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                scheduler.step()
        return optimizer.param_groups[0]["lr"]

    a, b = simulated(loop, algorithm).values()
    assert a != b


@pytest.mark.parametrize("algorithm", LOCKSTEP)
def test_a_schedule_of_ones_own_steps_over_uneven_epochs(algorithm):
    """All loops go through equally many batches."""

    def loop():
        model, optimizer = made()
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        with pl.attach(model, optimizer) as worker:
            for _ in range(6):
                for x in worker.batches(batches(5, worker=0)):
                    optimizer.zero_grad()
                    loss_of(model, x).backward()
                    optimizer.step()
                    scheduler.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="A scheduler of the learning rate is stepped once per step")
        simulated(loop, algorithm)


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce"])
def test_late_in_the_run_it_is_seen_at_the_next_hundredth_step(algorithm):
    def later(optimizer):
        steps = iter(range(1000))
        return lambda worker, loss: optimizer.param_groups[0].update(lr=0.1 if next(steps) < 120 + own_id() else 0.05)

    assert refused_at(lambda: trained(number=440, after_step=later), algorithm, APART) == 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce"])
def test_rounding_is_warned_of_once_and_evened_out(algorithm, dtype):
    """One worker's steps end in another last bit. What is left at the end came after the last comparison."""
    optimizer = on_worker_1(lambda _, p: p.mul_(1 + torch.finfo(dtype).eps))
    with pytest.warns(pl.errors.AlgorithmWarning, match=ROUNDED) as caught:
        a, b = simulated(lambda: trained(optimizer, 20, dtype=dtype), algorithm).values()
    assert sum(ROUNDED in str(one.message) for one in caught) == 1
    torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce"])
def test_one_small_tensor_is_compared_by_its_own_size(algorithm):
    refused_at(lambda: trained(on_worker_1(lambda number, p: p.add_(1e-5 * (number == 1)))), algorithm, APART)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Rprop])
@pytest.mark.parametrize("algorithm", LOCKSTEP)
def test_equal_replicas_are_left_alone(algorithm, optimizer):
    if "sharded" in algorithm and optimizer is torch.optim.Rprop:
        pytest.skip("not element by element")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{ROUNDED}")
        simulated(lambda: trained(optimizer, 25), algorithm)


@pytest.mark.parametrize(("factor", "is_rounding"), [(1 + 2.0**-22, True), (1.01, False)])
@pytest.mark.parametrize("algorithm", ["diloco(period=2)", "diloco(period=2, fragments=2)"])
def test_the_outer_state_is_compared(algorithm, factor, is_rounding, monkeypatch):
    merged, rules = OuterStep.merged, []

    def apart(self, fragment, *args):
        result = merged(self, fragment, *args)
        if self not in rules:
            rules.append(self)
        if self is not rules[0]:
            self._anchors[fragment].mul_(factor)
        return result

    monkeypatch.setattr(OuterStep, "merged", apart)
    if is_rounding:
        with pytest.warns(pl.errors.AlgorithmWarning, match=ROUNDED):
            simulated(lambda: trained(number=24), algorithm)
    else:
        refused_at(lambda: trained(number=24), algorithm, APART)


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "d-psgd", "local-sgd(period=2)"])
def test_launched(algorithm):
    """All workers end with the sentence, and none waits for another."""
    loop = {"all-reduce": lambda: trained(noisy)}.get(algorithm, lambda: trained(number=48, after_step=by_own_loss))
    with pytest.raises(pl.UsageError, match=APART if algorithm == "all-reduce" else RATES):
        pl.launch(loop, workers=2, algorithm=algorithm, backend="threads")


@pytest.mark.parametrize("num_workers", [2, 3, 16, 100, 256, 1000, 5000])
def test_what_all_say_is_exact_in_float32(num_workers):
    largest = Header.num_digests(num_workers) - 1
    assert largest > 50
    assert len(Header().numbers) == NUM_NUMBERS
    same = Header(True, largest, 2**24 // num_workers)
    others = [same._replace(has_report=False, digest=digest) for digest in (0, largest - 1)]
    for headers, is_equal in [
        ([same] * num_workers, True),
        *(([same] * (num_workers - 1) + [one], False) for one in others),
    ]:
        numbers = torch.tensor([one.numbers for one in headers], dtype=torch.float32).sum(0)
        exact = torch.tensor([one.numbers for one in headers], dtype=torch.float64).sum(0)
        assert numbers.tolist() == exact.tolist()
        assert max(numbers) <= 2**24
        assert Heard.of(numbers.tolist(), num_workers) == (True, is_equal, num_workers * same.samples)


def test_replicas_with_other_rates_have_other_digests():
    found = []
    for rates in (7, 8):
        replica = SimpleNamespace(round=0, step=1, rates=rates, closure=None, changed_outside=False, deal=None)
        collectives = SimpleNamespace(members=range(2))
        ports = SimpleNamespace(
            num_workers=2, worker_id=0, incarnation=0, collectives=collectives, newcomers=None, views=None
        )
        own = Round(replica, ports, Replacements(replica, ports))
        own.replicas.note([torch.arange(8.0)])
        found.append(own.header())
    assert found[0].digest != found[1].digest
    assert [one.has_report for one in found] == [False, False]
