"""Several optimizers in one loop: they step together, or each in its turn as those of adversarial models do."""

from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from loops import families
from loops.coder import batches, halves, loss_of, made, own_id, plain_halves, together, train_together, vector
from loops.table import HAVE_ONE_RATE
from processes import programs

TAKE_ONE = ["all-reduce(sharded=true)", "d-psgd", "ad-psgd"]
TAKE_SEVERAL = [name for name in families.ALL if name not in TAKE_ONE]
IN_ROUNDS = ["lockstep", "all-reduce", "parameter-server"]


def simulated(loop, algorithm, workers=2):
    found = {}

    def body():
        found[own_id()] = loop()

    run = pl.simulate(body, workers=workers, algorithm=algorithm)
    return found, run


@pytest.mark.parametrize("algorithm", [None, *TAKE_SEVERAL])
def test_alone_it_is_the_plain_loop_bit_for_bit(algorithm):
    model, _ = made()
    optimizers = halves(model)
    with pl.attach(model, optimizers, algorithm):
        train_together(model, optimizers, batches(6))
    assert torch.equal(vector(model), plain_halves(1, 6))


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_in_rounds_it_is_one_worker_with_the_batches_of_all(algorithm):
    found, run = simulated(together, algorithm, workers=3)
    for x in found.values():
        torch.testing.assert_close(x, plain_halves(3, 6), rtol=1e-4, atol=1e-5)
    assert run.result["steps"] == 6


@pytest.mark.parametrize("algorithm", TAKE_SEVERAL)
def test_all_parameters_are_trained_together(algorithm):
    found, run = simulated(lambda: together(40, 0.02 if algorithm in HAVE_ONE_RATE else 0.1), algorithm)
    initial = vector(made()[0])
    for x in found.values():
        assert ((x - initial).abs() > 1e-4).float().mean() > 0.9
    assert run.result["outcome"] == "stopped"


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "hogwild", "leashed", "parameter-server"])
def test_launched(algorithm, tmp_path):
    run = pl.launch(partial(programs.two_optimizers, tmp_path), workers=2, algorithm=algorithm)
    if algorithm in IN_ROUNDS:
        torch.testing.assert_close(torch.load(tmp_path / "1.pt"), plain_halves(2, 6), rtol=1e-4, atol=1e-5)
    else:
        assert run.result["steps"] == 12


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce"])
def test_a_worker_without_a_batch_steps_with_all_of_them(algorithm):
    """Three batches on two workers: the last round is the first worker's alone."""
    own = batches(3, worker=0)

    def loop():
        model, _ = made()
        optimizers = halves(model)
        with pl.attach(model, optimizers) as worker:
            train_together(model, optimizers, worker.batches(own))
        return vector(model)

    found, _ = simulated(loop, algorithm)
    model, _ = made()
    train_together(model, halves(model), [torch.cat(own[:2]), own[2]])
    for x in found.values():
        torch.testing.assert_close(x, vector(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["lockstep", "da-sgd", "leashed"])
def test_a_scheduler_may_step_before_the_next_optimizer(algorithm):
    """`da-sgd` lengthens each step, but not what schedulers see."""

    def loop():
        model, _ = made()
        optimizers = halves(model)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]
        with pl.attach(model, optimizers):
            for x in batches(4):
                loss_of(model, x).backward()
                for one, scheduler in zip(optimizers, schedulers, strict=True):
                    one.step()
                    scheduler.step()
        return [one.param_groups[0]["lr"] for one in optimizers]

    for rates in simulated(loop, algorithm)[0].values():
        assert rates == [0.02 / 16, 0.1 / 16]


@pytest.mark.parametrize("algorithm", TAKE_ONE)
def test_elsewhere_they_are_refused_by_name(algorithm):
    model, _ = made()
    with pytest.raises(pl.UsageError, match=r"takes one optimizer, but attach was given 2: choose hogwild") as raised:
        pl.simulate(lambda: pl.attach(model, halves(model)), workers=1, algorithm=algorithm)
    assert str(raised.value).startswith(algorithm.partition("(")[0])


@pytest.mark.parametrize("algorithm", [None, *TAKE_SEVERAL])
def test_one_that_steps_twice_is_told_of_the_other(algorithm):
    def loop(model, optimizers):
        with pl.attach(model, optimizers, algorithm):
            loss_of(model, batches(1)[0]).backward()
            optimizers[0].step()
            optimizers[0].step()

    model, _ = made()
    with pytest.raises(pl.UsageError, match=r"optimizer 0 \(Adam\) has stepped but optimizer 1 \(SGD\) has not"):
        pl.simulate(lambda: loop(model, halves(model, 0.02 if algorithm in HAVE_ONE_RATE else 0.1)), workers=1)


@pytest.mark.parametrize("where", ["next batch", "end"])
def test_one_that_never_steps(where):
    def loop(model, optimizers):
        with pl.attach(model, optimizers) as worker:
            for x in worker.batches(batches(2)):
                loss_of(model, x).backward()
                optimizers[0].step()
                if where == "end":
                    break

    model, _ = made()
    with pytest.raises(pl.UsageError, match=r"has stepped but optimizer 1"):
        pl.simulate(lambda: loop(model, halves(model)), workers=1)


@pytest.mark.parametrize("algorithm", [None, *TAKE_SEVERAL])
def test_a_pass_of_its_own_for_each_is_refused(algorithm):
    def loop(model, optimizers):
        with pl.attach(model, optimizers, algorithm):
            for one in optimizers:
                loss_of(model, batches(1)[0]).backward()
                one.step()

    model, _ = made()
    with pytest.raises(pl.UsageError, match=r"A backward pass began when optimizer 0 \(Adam\) had stepped"):
        pl.simulate(lambda: loop(model, halves(model, 0.02 if algorithm in HAVE_ONE_RATE else 0.1)), workers=1)


def test_clearing_between_their_steps_is_plain():
    """Also where the program applies nothing: gradients that were hidden do not come back to those that have been cleared."""
    for algorithm in [None, *TAKE_SEVERAL]:
        model, _ = made()
        optimizers = halves(model)
        with pl.attach(model, optimizers, algorithm):
            for x in batches(6):
                loss_of(model, x).backward()
                for one in optimizers:
                    one.step()
                    one.zero_grad()
        assert torch.equal(vector(model), plain_halves(1, 6)), algorithm


# In turn


class Generator(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)


class Critic(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)


def adversaries(lr=0.05):
    torch.manual_seed(1)
    models = Generator(), Critic()
    return models, [torch.optim.Adam(models[0].parameters(), lr=0.01), torch.optim.SGD(models[1].parameters(), lr=lr)]


def noise_and_real(steps, worker=None, size=4):
    generator = torch.Generator().manual_seed(200 + (own_id() if worker is None else worker))
    return [
        (torch.randn(size, 2, generator=generator), torch.randn(size, 3, generator=generator)) for _ in range(steps)
    ]


def compete(models, optimizers, pairs):
    """The critic's step, then the generator's, whose pass leaves gradients in the critic as well."""
    (make, judge), (of_make, of_judge) = models, optimizers
    for noise, real in pairs:
        of_judge.zero_grad()
        judge(real).mean().neg().backward()
        judge(make(noise).detach()).square().mean().backward()
        of_judge.step()
        of_make.zero_grad()
        judge(make(noise)).square().mean().backward()
        of_make.step()


def vectors(models):
    return torch.cat([vector(one) for one in models])


def plain_competition(num_workers, steps):
    models, optimizers = adversaries()
    of_workers = [noise_and_real(steps, worker) for worker in range(num_workers)]
    rounds = [tuple(map(torch.cat, zip(*of_round, strict=True))) for of_round in zip(*of_workers, strict=True)]
    compete(models, optimizers, rounds)
    return vectors(models)


def competition(steps=5, lr=0.05):
    models, optimizers = adversaries(lr)
    with pl.attach(models, optimizers):
        compete(models, optimizers, noise_and_real(steps))
    return vectors(models)


@pytest.mark.parametrize("algorithm", [None, *TAKE_SEVERAL])
def test_in_turn_alone_it_is_the_plain_loop_bit_for_bit(algorithm):
    models, optimizers = adversaries()
    with pl.attach(models, optimizers, algorithm):
        compete(models, optimizers, noise_and_real(5))
    assert torch.equal(vectors(models), plain_competition(1, 5))


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_in_turn_in_rounds_it_is_one_worker_with_the_batches_of_all(algorithm):
    found, run = simulated(competition, algorithm, workers=3)
    for x in found.values():
        torch.testing.assert_close(x, plain_competition(3, 5), rtol=1e-4, atol=1e-5)
    assert run.result["steps"] == 10


@pytest.mark.parametrize("algorithm", TAKE_SEVERAL)
def test_in_turn_both_are_trained(algorithm):
    found, _ = simulated(lambda: competition(30, 0.01 if algorithm in HAVE_ONE_RATE else 0.05), algorithm)
    initial = vectors(adversaries()[0])
    for x in found.values():
        assert ((x - initial).abs() > 1e-4).all()


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce"])
def test_turns_that_differ_between_workers_are_refused(algorithm):
    def loop():
        models, optimizers = adversaries()
        with pl.attach(models, optimizers):
            models[1](models[0](torch.ones(1, 2))).sum().backward()
            optimizers[own_id()].step()

    with pytest.raises(pl.UsageError, match="Workers step different optimizers in the same round"):
        simulated(loop, algorithm)


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_in_turn_a_round_with_one_batch_is_made_with_that_batch(algorithm):
    pairs = noise_and_real(3, worker=0)

    def loop():
        models, optimizers = adversaries()
        with pl.attach(models, optimizers) as worker:
            compete(models, optimizers, worker.batches(pairs))
        return vectors(models)

    models, optimizers = adversaries()
    compete(models, optimizers, [tuple(map(torch.cat, zip(*pairs[:2], strict=True))), pairs[2]])
    for x in simulated(loop, algorithm)[0].values():
        torch.testing.assert_close(x, vectors(models), rtol=1e-4, atol=1e-5)


def learn_after_all_passes(models, optimizers, pairs):
    """As an actor and a critic may, with gradients that keep their memory from step to step."""
    for noise, real in pairs:
        for one in optimizers:
            one.zero_grad(set_to_none=False)
        models[0](noise).square().mean().backward()
        models[1](real).square().mean().backward()
        for one in optimizers:
            one.step()


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_in_turn_the_step_of_one_leaves_the_gradients_of_the_others(algorithm):
    def loop():
        models, optimizers = adversaries()
        with pl.attach(models, optimizers):
            learn_after_all_passes(models, optimizers, noise_and_real(5))
        return vectors(models)

    models, optimizers = adversaries()
    rounds = zip(noise_and_real(5, worker=0), noise_and_real(5, worker=1), strict=True)
    learn_after_all_passes(models, optimizers, [tuple(map(torch.cat, zip(*pairs, strict=True))) for pairs in rounds])
    for x in simulated(loop, algorithm)[0].values():
        torch.testing.assert_close(x, vectors(models), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce"])
def test_in_turn_clipping_acts_before_the_mean_with_a_warning(algorithm):
    def loop():
        (make, judge), optimizers = adversaries()
        with pl.attach((make, judge), optimizers):
            for noise, _ in noise_and_real(3):
                judge(make(noise)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(judge.parameters(), 1e-3)
                optimizers[1].step()

    with pytest.warns(pl.errors.ClippingWarning, match="optimizers that step in turn") as caught:
        simulated(loop, algorithm)
    assert len(caught) == 1


def test_evaluate_is_called_with_the_models_as_they_were_given():
    def judged(models):
        assert [type(one) for one in models] == [Generator, Critic]
        return 0.5

    def loop():
        models, optimizers = adversaries()
        with pl.attach(models, optimizers, evaluate=judged):
            compete(models, optimizers, noise_and_real(3))

    _, run = simulated(loop, "hogwild")
    assert run.result["outcome"] == "stopped"
    run = pl.simulate(loop, workers=2, algorithm="hogwild", target_accuracy=0.4)
    assert run.result["outcome"] == "converged"


# What attach is given


def test_one_optimizer_over_several_models():
    """Such as of a loss with parameters of its own."""
    (make, judge), _ = adversaries()
    optimizer = torch.optim.SGD([*make.parameters(), *judge.parameters()], lr=0.1)
    before = vectors((make, judge))
    with pl.attach((make, judge), optimizer):
        judge(make(torch.ones(1, 2))).sum().backward()
        optimizer.step()
    assert (vectors((make, judge)) != before).all()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "a list of nothing"),
        ([torch.nn.Linear(1, 1)], "a list of Linear"),
        ("twice", "the same optimizer twice"),
    ],
    ids=["none", "a model", "twice"],
)
def test_what_is_no_list_of_optimizers(given, says):
    model, optimizer = made()
    with pytest.raises(pl.UsageError, match=says):
        pl.attach(model, [optimizer, optimizer] if given == "twice" else given)


@pytest.mark.parametrize("given", [(), (1,), 1], ids=["none", "a number", "no tuple"])
def test_what_is_no_tuple_of_models(given):
    with pytest.raises(pl.UsageError, match="a tuple of models"):
        pl.attach(given, made()[1])


def test_a_scaler_of_several_that_step_together_is_refused():
    def loop(model, optimizers):
        scaler = torch.amp.GradScaler("cpu")
        with pl.attach(model, optimizers):
            scaler.scale(loss_of(model, batches(1)[0])).backward()
            scaler.step(optimizers[0])

    model, _ = made()
    with pytest.raises(pl.UsageError, match="use bfloat16"):
        pl.simulate(lambda: loop(model, halves(model)), workers=1)


@pytest.mark.parametrize("algorithm", [None, *TAKE_SEVERAL])
def test_a_scaler_in_turn(algorithm):
    def scaled(models, optimizers, pairs):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number, (noise, _) in enumerate(pairs):
            for one in optimizers:
                one.zero_grad()
                loss = models[1](models[0](noise)).square().mean()
                if number == 2:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                scaler.step(one)
                scaler.update()

    own, ours = adversaries(), adversaries()
    scaled(*own, noise_and_real(5))
    with pl.attach(*ours, algorithm):
        scaled(*ours, noise_and_real(5))
    assert torch.equal(vectors(ours[0]), vectors(own[0]))


def test_each_gets_its_state_back(tmp_path):
    """Momentum and Adam's moments go on where they were."""
    settings = {"workers": 1, "algorithm": "hogwild"}
    loop, out = partial(programs.two_optimizers_by_epochs, tmp_path), tmp_path / "run"
    whole = pl.launch(partial(loop, 4), **settings)
    expected = torch.load(tmp_path / "0.pt")
    pl.launch(partial(loop, 2), out=out, **settings)
    assert not torch.equal(torch.load(tmp_path / "0.pt"), expected)
    resumed = pl.launch(partial(loop, 4), resume=out, out=out, **settings)
    assert torch.equal(torch.load(tmp_path / "0.pt"), expected)
    assert whole.result["steps"] == resumed.result["steps"] == 16
