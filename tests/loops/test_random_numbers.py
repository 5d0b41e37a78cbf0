"""Workers that seed alike and draw their own batches: they draw different ones, and one worker draws what it did."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from loops import families
from loops.coder import HELD_OUT, batches, loss_of, made, own_id, vector
from paceline.loop.random_numbers import alike, digests_of_states, go_apart

ON_CPU = torch.device("cpu")
SAME = "same inputs in their first 3 steps"


def drawn():
    return random.random(), np.random.rand(), torch.rand(1).item()


def seeded():
    torch.manual_seed(1337)
    np.random.seed(1337)
    random.seed(1337)


def draws(kept, seed=seeded, steps=4, **options):
    def loop():
        model, optimizer = made()
        seed()
        with pl.attach(model, optimizer, **options):
            for _ in range(steps):
                x = HELD_OUT[torch.randint(len(HELD_OUT), (4,))] + drawn()[0]
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                kept.setdefault(own_id(), []).append((drawn(), x.sum().item()))
        return vector(model)

    return loop


def plain(steps=4):
    kept = {}
    loop = draws(kept, steps=steps)
    return loop(), kept[0]


@pytest.mark.parametrize("algorithm", families.ALL)
def test_workers_that_seed_alike_draw_different_numbers_and_worker_0_those_of_plain_training(algorithm):
    kept = {}
    pl.simulate(draws(kept), workers=3, algorithm=algorithm)
    first = [[row[number] for row, _ in rows] for rows in kept.values() for number in range(3)]
    assert len({tuple(numbers) for numbers in first}) == 9
    assert len({total for rows in kept.values() for _, total in rows}) == 12  # no two see the same batch
    assert kept[0] == plain()[1]


def test_one_worker_is_plain_training_bit_for_bit():
    model, optimizer = made()
    seeded()
    for _ in range(4):
        x = HELD_OUT[torch.randint(len(HELD_OUT), (4,))] + drawn()[0]
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        drawn()
    assert torch.equal(plain()[0], vector(model))
    for one in (pl.simulate(draws({}), workers=1, algorithm="hogwild").returned[0],):
        assert torch.equal(one, vector(model))


def test_equal_runs_draw_equal_numbers():
    kept = [{}, {}]
    for one in kept:
        pl.simulate(draws(one), workers=3, algorithm="all-reduce")
    assert kept[0] == kept[1]


def test_generators_that_the_loop_seeds_by_worker_are_left_alone():
    def by_worker():
        seeded()
        torch.manual_seed(own_id())

    kept = {}
    pl.simulate(draws(kept, seed=by_worker), workers=2, algorithm="hogwild")
    torch.manual_seed(1)
    torch.randint(len(HELD_OUT), (4,))
    torch.rand(1)  # beside what it draws from the other generators
    assert kept[1][0][0][2] == torch.rand(1).item()
    assert kept[0][0][0][:2] != kept[1][0][0][:2]  # and those that are alike are not


@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild"])
def test_same_random_leaves_them(algorithm):
    kept = {}
    pl.simulate(draws(kept, same_random=True), workers=2, algorithm=algorithm)
    assert kept[0] == kept[1] == plain()[1]


def test_a_replaced_worker_draws_what_no_other_and_not_its_predecessor_drew():
    seeded()
    states = digests_of_states(ON_CPU)
    equal = alike([states, states], states)
    found = []
    for who in [(1, 0), (1, 1), (0, 1), (2, 0)]:
        seeded()
        go_apart(ON_CPU, states, equal, *who)
        found.extend(drawn())
    seeded()
    assert len({*found, *drawn()}) == 15


def test_a_generator_that_differs_anywhere_is_not_alike():
    seeded()
    states = digests_of_states(ON_CPU)
    random.random()
    assert alike([states, states, digests_of_states(ON_CPU)], states) == (False, True, True, False)
    assert alike([states, (0, 0, 0, 0)], states) == (False,) * 4
    assert alike(None, states) == ()


def fixed_order(**options):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer, **options):
            for x in batches(5, worker=0):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()

    return loop


@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.parametrize("are_equal", [True, False])
def test_equal_sparse_inputs_are_warned_of(to_sparse, are_equal):
    def loop():
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer):
            for x in batches(5, worker=0 if are_equal else None):
                optimizer.zero_grad()
                model(to_sparse(x.relu())).square().mean().backward()
                optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.simulate(loop, workers=2, algorithm="hogwild")
    assert sum(SAME in str(one.message) for one in caught) == are_equal


@pytest.mark.parametrize("algorithm", families.ALL)
def test_equal_inputs_all_the_same_are_warned_of(algorithm):
    with pytest.warns(UserWarning, match=SAME) as caught:
        pl.simulate(fixed_order(), workers=3, algorithm=algorithm)
    assert len([one for one in caught if SAME in str(one.message)]) == 1
    pl.simulate(fixed_order(same_random=True), workers=3, algorithm=algorithm)
    pl.simulate(fixed_order(), workers=1, algorithm=algorithm)


def test_inputs_that_are_equal_on_some_workers_or_in_some_steps_are_not():
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer):
            for number, x in enumerate(batches(5, worker=0)):
                optimizer.zero_grad()
                loss_of(model, x + (number == 2 and own_id() == 1)).backward()
                optimizer.step()

    pl.simulate(loop, workers=2, algorithm="all-reduce")


@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild", "parameter-server(mode=async)"])
def test_a_state_that_is_carried_beside_equal_inputs_does_not_hide_them(algorithm):
    """A fixed order of batches, as language models have it; dropout makes the state differ between workers."""

    def loop():
        model = nn.ModuleDict({"cell": nn.LSTM(6, 5), "head": nn.Linear(5, 6)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        with pl.attach(model, optimizer):
            state = torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)
            for x in HELD_OUT[:48].view(4, 6, 2, 6):
                optimizer.zero_grad()
                out, state = model["cell"](x, tuple(one.detach() for one in state))
                state = tuple(F.dropout(one) for one in state)
                model["head"](out).square().mean().backward()
                optimizer.step()

    with pytest.warns(UserWarning, match=SAME):
        pl.simulate(loop, workers=2, algorithm=algorithm)


class Placed(nn.Module):
    """Its first input is the same in every call."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, places, tokens):
        return self.embedding(tokens) * places[:, None]


def test_integers_that_differ_beside_an_equal_first_input_are_other_inputs():
    def loop():
        model = Placed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.arange(3.0), torch.arange(3) + own_id()).square().sum().backward()
                optimizer.step()

    pl.simulate(loop, workers=2, algorithm="hogwild")


def test_worker_batches_of_equal_contents_are_not_warned_of():
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.ones(2, 6)] * 12):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()

    pl.simulate(loop, workers=2, algorithm="all-reduce")
