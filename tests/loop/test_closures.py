"""A closure belongs to the optimizer: several evaluations are rounds of all workers, steps on a copy, or refused."""

import contextlib
import threading

import pytest
import torch
from torch import nn

import paceline as pl
from loops.habits.sharpness import SharpnessAware

TOGETHER = ["lockstep", "all-reduce"]
ON_A_COPY = [
    "hogwild",
    "hogwild(reads=copy)",
    "locked",
    "leashed",
    "ad-psgd",
    "local-sgd",
    "d-psgd",
    "da-sgd",
    "diloco",
]
ONCE = [
    "all-reduce(sharded=true)", "all-reduce(codec=qsgd(bits=8))", "local-sgd(warmup_steps=3)", "parameter-server", "downpour",
    "adaptive-revision",
]  # fmt: skip
KINDS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.3, max_iter=4),
    "line search": lambda parameters: torch.optim.LBFGS(parameters, max_iter=5, line_search_fn="strong_wolfe"),
    "sharpness": lambda parameters: SharpnessAware(parameters, lr=0.05, radius=0.05),
}
SIZES = [8, 4, 10, 8, 8, 8, 3, 5]  # of three workers the last has no batch in the last round


def batches(sizes=SIZES):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(sizes), 5, generator=generator, dtype=torch.float64)
    return list(zip(x.split(sizes), x.sum(1, keepdim=True).sin().split(sizes), strict=True))


def whole(rounds, workers=3):
    """The same, with each round of the workers as one batch."""
    return [
        tuple(map(torch.cat, zip(*rounds[at : at + workers], strict=True))) for at in range(0, len(rounds), workers)
    ]


def made(kind):
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model, KINDS[kind](model.parameters())


def train(model, optimizer, data, *, clips=False, extra=lambda step: 0):
    """What closures return to the optimizer; `extra`: how often it is evaluated beside."""
    returned = []
    for step, (x, y) in enumerate(data):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            return loss

        def several(closure=closure, step=step):
            for _ in range(extra(step)):
                closure()
            return closure()

        if isinstance(optimizer, SharpnessAware):
            closure()
        returned.append(optimizer.step(several).item())
    return returned


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def simulated(kind, algorithm, workers=3, **options):
    """Parameters and losses of every worker."""
    found, lock = {}, threading.Lock()

    def body():
        model, optimizer = made(kind)
        with pl.attach(model, optimizer) as worker:
            losses = train(model, optimizer, worker.batches(batches()), **options)
        with lock:
            found[worker.worker_id] = vector(model), losses

    run = pl.simulate(body, workers=workers, algorithm=algorithm)
    return [found[worker] for worker in range(workers)], run


def plainly(kind, data, **options):
    model, optimizer = made(kind)
    losses = train(model, optimizer, data, **options)
    return vector(model), losses


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("algorithm", TOGETHER)
@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_are_rounds_of_all_workers(kind, algorithm, clips):
    if clips and algorithm == "lockstep":
        with pytest.warns(pl.errors.ClippingWarning):
            simulated(kind, algorithm, clips=True)
        return
    expected, losses = plainly(kind, whole(batches()), clips=clips)
    workers, run = simulated(kind, algorithm, clips=clips)
    tolerance = 1e-10 if not clips else 1e-8  # a clipped gradient makes LBFGS's curvature nearly singular
    for found, returned in workers:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)
        torch.testing.assert_close(returned, losses[: len(returned)], rtol=0.0, atol=tolerance)
        assert torch.equal(found, workers[0][0])
    assert run.result["samples"] == sum(SIZES)
    assert run.result["steps"] == 3


@pytest.mark.parametrize("algorithm", TOGETHER)
def test_a_loop_that_fetches_its_batches_by_itself_counts_those_of_one_evaluation(algorithm):
    expected, _ = plainly("lbfgs", [whole(batches(), 8)[0]] * 4)

    def body():
        model, optimizer = made("lbfgs")
        with pl.attach(model, optimizer) as worker:
            train(model, optimizer, [whole(batches()[worker.worker_id :: 2], 4)[0]] * 4)
        torch.testing.assert_close(vector(model), expected, rtol=0.0, atol=1e-10)

    assert pl.simulate(body, workers=2, algorithm=algorithm).result["samples"] == 4 * sum(SIZES)


class Impatient(torch.optim.SGD):
    """Evaluates its closure more often on one worker."""

    times = 1

    def step(self, closure):
        for _ in range(self.times - 1):
            closure()
        return super().step(closure)


@pytest.mark.parametrize("in_step", [1, 3])
@pytest.mark.parametrize("algorithm", TOGETHER)
def test_unequal_evaluations_are_refused_on_all_workers(algorithm, in_step):
    refused = []

    def body():
        model, _ = made("sgd")
        optimizer = Impatient(model.parameters(), lr=0.1)
        try:
            with pl.attach(model, optimizer) as worker:
                for step, batch in enumerate(worker.batches(batches([4] * 8))):
                    optimizer.times = 2 + (worker.worker_id == 1 and step == in_step)
                    train(model, optimizer, [batch])
        except pl.UsageError as error:
            refused.append("decide by the closure's return value" in str(error))

    pl.simulate(body, workers=2, algorithm=algorithm)
    assert refused == [True, True]


@pytest.mark.parametrize("algorithm", TOGETHER)
def test_a_closure_may_return_nothing(algorithm):
    def body():
        model, optimizer = made("sgd")
        with pl.attach(model, optimizer) as worker:
            for x, y in worker.batches(batches()):
                assert optimizer.step(lambda x=x, y=y: (model(x) - y).square().mean().backward()) is None
                optimizer.zero_grad()

    pl.simulate(body, workers=3, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", [*TOGETHER, "hogwild"])
@pytest.mark.parametrize(
    ("made_of", "expected"),
    [
        (lambda loss: 3, float),
        (lambda loss: (loss, "accuracy"), tuple),
        (lambda loss: loss.detach().view(1, 1), torch.Tensor),
    ],
)
def test_a_closure_may_return_any_value(algorithm, made_of, expected):
    """The mean of numbers, in the tensor's shape; everything else is the worker's own."""
    returned = []

    def body():
        model, optimizer = made("sgd")
        with pl.attach(model, optimizer) as worker:
            for x, y in worker.batches(batches([4] * 4)):

                def closure(x=x, y=y):
                    optimizer.zero_grad()
                    loss = (model(x) - y).square().mean()
                    loss.backward()
                    return made_of(loss)

                returned.append(optimizer.step(closure))

    pl.simulate(body, workers=2, algorithm=algorithm)
    assert all(isinstance(one, (expected, int)) for one in returned)
    if expected is torch.Tensor:
        assert {tuple(one.shape) for one in returned} == {(1, 1)}


class OwnSignature(torch.optim.SGD):
    """Its closure has another name, and another argument goes before or after it."""

    def step(self, evaluate=None, factor=1.0):
        assert factor == 2.0
        return super().step(evaluate)


def test_an_optimizer_may_name_its_closure_otherwise():
    def body():
        model, _ = made("sgd")
        optimizer = OwnSignature(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for x, y in worker.batches(batches([4] * 4)):
                optimizer.step(lambda x=x, y=y: (model(x) - y).square().mean().backward(), 2.0)
                optimizer.zero_grad()

    assert pl.simulate(body, workers=2, algorithm="lockstep").result["steps"] == 2


def after_an_error(kind, algorithm, *, breaks="closure", workers=(0, 1)):
    """Every worker fetches four batches by itself; a step of the second raises an error, which the loop catches."""
    ends = []

    class Breaks(torch.optim.SGD):
        def step(self, closure=None):
            if self.fails:
                raise ZeroDivisionError
            return super().step(closure)

    def body():
        model, optimizer = made(kind)
        if breaks == "step":
            optimizer = Breaks(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for step, (x, y) in enumerate(batches([4] * 8)[worker.worker_id :: 2]):
                optimizer.fails = step == 1 and worker.worker_id in workers

                def closure(x=x, y=y):
                    optimizer.zero_grad()
                    loss = (model(x) - y).square().mean()
                    if optimizer.fails and breaks == "closure":
                        raise ZeroDivisionError
                    loss.backward()
                    return loss

                with contextlib.suppress(ZeroDivisionError):
                    if breaks == "step":
                        closure()
                    optimizer.step(*[closure] * (breaks == "closure"))
        ends.append(vector(model))

    run = pl.simulate(body, workers=2, algorithm=algorithm)
    return run.result["steps"], ends


@pytest.mark.parametrize("breaks", ["closure", "step"])
@pytest.mark.parametrize("algorithm", [*TOGETHER, "hogwild", "local-sgd"])
def test_a_step_that_raises_an_error_is_over(algorithm, breaks):
    steps, ends = after_an_error("sgd", algorithm, breaks=breaks)
    assert steps >= (2 if algorithm in TOGETHER else 6)
    assert torch.equal(*ends)


@pytest.mark.parametrize("workers", [(1,), (0, 1)])
@pytest.mark.parametrize("algorithm", TOGETHER)
def test_no_step_follows_a_round_that_a_closure_has_broken_off(algorithm, workers):
    with pytest.raises(pl.UsageError, match="closure of the last step raised an error"):
        after_an_error("lbfgs", algorithm, workers=workers)


def test_a_closure_on_some_workers_only_is_refused():
    def body():
        model, optimizer = made("sgd")
        with pl.attach(model, optimizer) as worker:
            for x, y in worker.batches(batches([4] * 4)):
                if worker.worker_id:
                    train(model, optimizer, [(x, y)])
                else:
                    (model(x) - y).square().mean().backward()
                    optimizer.step()

    with pytest.raises(pl.UsageError, match=r"passed step\(\) a closure and others did not"):
        pl.simulate(body, workers=2, algorithm="lockstep")


@pytest.mark.parametrize("algorithm", ON_A_COPY)
def test_elsewhere_a_step_is_made_on_a_copy_and_its_difference_applied(algorithm):
    """While the optimizer evaluates, nobody else sees where it has moved to."""
    model, optimizer = made("sharpness")
    before = vector(model)
    train(model, optimizer, batches([8]))
    change = vector(model) - before
    found = []

    def body():
        model, optimizer = made("sharpness")
        with pl.attach(model, optimizer) as worker:
            for x, y in worker.batches([batches([8])[0]] * 2):
                train(model, optimizer, [(x, y)])
        found.append(vector(model) - before)

    pl.simulate(body, workers=2, algorithm=algorithm)
    for one in found:
        assert nn.functional.cosine_similarity(one, change, dim=0) > 0.9
        assert one.norm() < 2.1 * change.norm()


@pytest.mark.parametrize("algorithm", ONCE)
@pytest.mark.parametrize("kind", ["sharpness", "twice"])
def test_a_method_of_one_gradient_per_step_refuses_a_second_evaluation(kind, algorithm):
    def body():
        model, optimizer = made("sharpness")
        if kind == "twice":
            optimizer = Impatient(model.parameters(), lr=0.1)
            optimizer.times = 2
        with pl.attach(model, optimizer) as worker:
            train(model, optimizer, worker.batches(batches([4] * 8)))

    with pytest.raises(
        pl.UsageError,
        match=r"evaluates its closure several times|cannot apply (Impatient|SharpnessAware)|Impatient may not",
    ):
        pl.simulate(body, workers=2, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", [*ON_A_COPY, *ONCE])
def test_lbfgs_is_refused_before_training_where_workers_choose_by_their_own_loss(algorithm):
    def body():
        pl.attach(*made("lbfgs"))
        pytest.fail("attach took it")

    with pytest.raises(pl.UsageError, match=r"lockstep or all-reduce \(not sharded"):
        pl.simulate(body, workers=2, algorithm=algorithm)


def test_an_optimizer_that_does_not_evaluate_its_closure_is_refused_where_it_would_step_on_nothing():
    class Deaf(torch.optim.SGD):
        def step(self, closure=None):
            return super().step()

    def body():
        model, _ = made("sgd")
        optimizer = Deaf(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for _ in worker.batches(batches()):
                optimizer.step(lambda: None)

    with pytest.raises(pl.UsageError, match="did not evaluate the closure"):
        pl.simulate(body, workers=2, algorithm="all-reduce(codec=qsgd(bits=8))")


@pytest.mark.parametrize(
    "algorithm", ["hogwild", "locked", "leashed", "lockstep", "all-reduce(sharded=true)", "local-sgd"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_launched_worker_is_plain_pytorch(kind, algorithm):
    [(found, losses)], _ = simulated(kind, algorithm, workers=1)
    expected = plainly(kind, batches())
    assert torch.equal(found, expected[0])
    assert losses == expected[1]
