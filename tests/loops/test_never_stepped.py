"""Loops that make gradients and never call `optimizer.step()`, and those that only look like it."""

import warnings

import pytest
import torch

import paceline as pl
from loops import families
from loops.coder import batches, loss_of, made, own_id
from paceline.errors import AlgorithmWarning

SAYS = "never called optimizer.step"
DELAYED = "sequential(delay=constant(updates_late=1))"  # which is watched without a launcher, too


def simulated(loop, algorithm):
    pl.simulate(loop, workers=2, algorithm=algorithm)


def launched(loop, algorithm):
    pl.launch(loop, workers=2, algorithm=algorithm, backend="threads")


def by_hand(model, optimizer, own):
    """As a book shows it."""
    for x in own:
        loss_of(model, x).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None


def by_data(model, optimizer, own):
    for x in own:
        model.zero_grad()
        loss_of(model, x).backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)


def forgotten(model, optimizer, own):
    for x in own:
        optimizer.zero_grad()
        loss_of(model, x).backward()


def forgotten_and_zeroed(model, optimizer, own):
    for x in own:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, x).backward()


def another_optimizer(model, optimizer, own):
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in own:
        other.zero_grad()
        loss_of(model, x).backward()
        other.step()


def attached(train, algorithm, uses_batches, number=6):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer, algorithm) as worker:
            train(model, optimizer, worker.batches(batches(number, worker=0)) if uses_batches else batches(number))

    return loop


NEVER = [by_hand, by_data, forgotten, forgotten_and_zeroed, another_optimizer]


@pytest.mark.parametrize("uses_batches", [True, False], ids=["batches", "own batches"])
@pytest.mark.parametrize("train", NEVER)
def test_of_one_worker(train, uses_batches):
    with pytest.raises(pl.UsageError, match=SAYS):
        pl.simulate(attached(train, None, uses_batches), workers=1)


@pytest.mark.parametrize("start", [simulated, launched])
@pytest.mark.parametrize("algorithm", families.ALL)
def test_of_several_workers_the_loop_s_own_sentence_is_seen(algorithm, start):
    with pytest.raises(pl.UsageError, match=SAYS):
        start(attached(forgotten, None, False), algorithm)


@pytest.mark.parametrize("train", NEVER)
@pytest.mark.parametrize("algorithm", ["hogwild", "all-reduce", "d-psgd", "parameter-server(mode=async)"])
def test_whatever_is_done_in_place_of_it(algorithm, train):
    with pytest.raises(
        pl.PacelineError, match=SAYS if train is not another_optimizer else "steps a SGD that attach was not"
    ):
        simulated(attached(train, None, True), algorithm)


@pytest.mark.parametrize(
    ("algorithm", "train", "uses_batches", "number"),
    [
        (algorithm, train, *own)
        for algorithm in (*families.ALL, DELAYED)
        for train in (by_hand, by_data)
        for own in ((True, 2), (False, 10))
        if algorithm in ("hogwild", "all-reduce(sharded=true)", DELAYED) or own[0] == (train is by_data)
    ],
)
def test_updates_by_hand_are_refused_at_once(algorithm, train, uses_batches, number):
    """Not seen before the end: changes by `p.data` of a vector that others write."""
    had = []

    def counted(model, optimizer, own):
        train(model, optimizer, (had.append(own_id()) or x for x in own))

    is_raced = train is by_data and algorithm == "hogwild"
    says = f"{SAYS}|loops changed them outside optimizer.step" if algorithm == "all-reduce(sharded=true)" else SAYS
    loop = attached(counted, algorithm if algorithm == DELAYED else None, uses_batches, 40)
    with pytest.raises(pl.UsageError, match=says):
        loop() if algorithm == DELAYED else simulated(loop, algorithm)
    assert is_raced or max(map(had.count, set(had))) <= number + (not uses_batches)


def extrapolated(model, optimizer, own):
    """An extragradient step: what the first batch has moved, the second puts back before it steps."""
    before = []
    for number, x in enumerate(own):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        with torch.no_grad():
            if number % 2 == 0:
                before = [p.clone() for p in model.parameters()]
                for p in model.parameters():
                    p -= 0.1 * p.grad
                continue
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
        optimizer.step()


def inner_steps(model, optimizer, own):
    """Reptile: the outer step goes towards where five inner ones have come."""
    for x in own:
        before = [p.detach().clone() for p in model.parameters()]
        by_hand(model, optimizer, [x] * 5)
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.grad = old - p
                p.copy_(old)
        optimizer.step()


@pytest.mark.parametrize("uses_batches", [True, False], ids=["batches", "own batches"])
@pytest.mark.parametrize("train", [extrapolated, inner_steps])
def test_a_loop_may_move_its_parameters_within_its_first_step(train, uses_batches):
    for algorithm in ("local-sgd(period=3)", "hogwild"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AlgorithmWarning)
            simulated(attached(train, None, uses_batches, 8), algorithm)


def test_a_layer_that_moves_its_weights_in_each_forward_pass():
    """`max_norm` scales the rows that a batch looks up, while the loop accumulates."""
    rows = torch.arange(12).view(6, 2)

    def loop():
        table = torch.nn.Embedding(12, 3, max_norm=0.1)
        model = torch.nn.Sequential(table, torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer, DELAYED) as worker:
            for number, x in enumerate(worker.batches(list(rows)), start=1):
                model(x).square().mean().backward()
                if number == len(rows):
                    optimizer.step()

    loop()


def nothing_but_evaluation(model, optimizer, own):
    model.eval()
    with torch.no_grad():
        for x in own:
            loss_of(model, x)


def evaluation_with_gradients_enabled(model, optimizer, own):
    for x in own:
        loss_of(model, x).item()


def evaluation_of_what_is_loaded(model, optimizer, own):
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    evaluation_with_gradients_enabled(model, optimizer, own)


def left_at_the_first(model, optimizer, own):
    for x in own:
        loss_of(model, x).backward()
        break


def left_while_it_accumulates(model, optimizer, own):
    optimizer.zero_grad()
    for number, x in enumerate(own, start=1):
        loss_of(model, x).backward()
        if number == 3:
            break
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


def accumulated(model, optimizer, own):
    optimizer.zero_grad()
    for number, x in enumerate(own, start=1):
        loss_of(model, x).backward()
        if number == 5:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("uses_batches", [True, False], ids=["batches", "own batches"])
@pytest.mark.parametrize(
    "train",
    [
        nothing_but_evaluation,
        evaluation_with_gradients_enabled,
        evaluation_of_what_is_loaded,
        left_at_the_first,
        left_while_it_accumulates,
        accumulated,
    ],
)
def test_what_is_no_error(train, uses_batches):
    attached(train, DELAYED, uses_batches)()


def test_gradients_from_before_are_not_the_loop_s():
    model, optimizer = made()
    loss_of(model, batches(1)[0]).backward()
    with pl.attach(model, optimizer, DELAYED):
        nothing_but_evaluation(model, optimizer, batches(3))


def test_a_loop_s_own_error_is_the_one_that_is_seen():
    def fails(model, optimizer, own):
        forgotten(model, optimizer, own)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        attached(fails, DELAYED, True)()


@pytest.mark.parametrize("algorithm", ["hogwild", "ad-psgd", "parameter-server(mode=async)"])
def test_a_worker_whose_batches_do_not_fill_a_step_beside_one_whose_do(algorithm):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer):
            accumulated(model, optimizer, batches(3 if own_id() else 6))

    simulated(loop, algorithm)
    launched(loop, algorithm)


def test_adversaries_of_whom_one_never_steps_the_other_s_gradients():
    """The critic's pass leaves gradients in the generator, which are thrown away."""

    def loop():
        generator, of_generator = made()
        critic = torch.nn.Linear(6, 1)
        of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
        with pl.attach(generator, of_generator):
            for number, x in enumerate(batches(8), start=1):
                of_critic.zero_grad()
                critic(generator(x)).mean().backward()
                of_critic.step()
                if number % 4 == 0:
                    of_generator.zero_grad()
                    (-critic(generator(x)).mean()).backward()
                    of_generator.step()

    pl.simulate(loop, workers=1)
