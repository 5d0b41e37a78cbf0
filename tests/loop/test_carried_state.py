"""What a replacement gets of another worker's loop, and what it cannot take."""

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from paceline.errors import NotReplacedError
from paceline.loop.carried_state import CarriedState
from paceline.loop.schedules import find_schedulers


def weights():
    return [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]


def adam():
    return torch.optim.Adam(weights(), lr=0.1)


def test_a_plateau_scheduler_is_carried_although_its_optimizer_shows_no_trace_of_it():
    giver, taker = adam(), adam()
    given, own = ReduceLROnPlateau(giver, factor=0.5, patience=1), ReduceLROnPlateau(taker, factor=0.5, patience=1)
    for loss in (3.0, 4.0, 4.0, 2.0):
        given.step(loss)
    CarriedState(taker, []).take(CarriedState(giver, []).state(None), None)
    assert (own.best, own.num_bad_epochs, own.last_epoch) == (given.best, given.num_bad_epochs, given.last_epoch)
    assert taker.param_groups[0]["lr"] == giver.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    ("taker", "why"),
    [
        (lambda: torch.optim.SGD(weights(), lr=0.1), "its optimizer, or one of its schedulers"),
        (lambda: torch.optim.Adam([{"params": [one]} for one in weights()], lr=0.1), "its optimizer, or one of"),
        (lambda: torch.optim.Adam(weights()[:1], lr=0.1), "its optimizer, or one of"),
    ],
    ids=["class", "groups", "parameters"],
)
def test_another_optimizer_cannot_take_it(taker, why):
    given = CarriedState(adam(), []).state(None)
    with pytest.raises(NotReplacedError, match=why):
        CarriedState(taker(), []).take(given, None)


def test_other_schedulers_cannot_take_it():
    giver, taker = adam(), adam()
    scheduler = StepLR(giver, 3)
    given = CarriedState(giver, []).state(None)
    with pytest.raises(NotReplacedError, match="several schedulers of one class, or only some"):
        CarriedState(taker, []).take(given, None)
    assert scheduler.last_epoch == 0


def test_a_scheduler_that_the_loop_has_replaced_is_not_carried():
    giver, taker = adam(), adam()
    carried, prepared = CarriedState(giver, []), CarriedState(taker, [])
    scheduler, own = StepLR(giver, 10), StepLR(taker, 10)
    assert carried.is_whole()
    prepared.prepare()
    scheduler, own = StepLR(giver, 50), StepLR(taker, 50)
    assert carried.is_whole()
    for _ in range(3):
        giver.step()
        scheduler.step()
    prepared.prepare()
    prepared.take(carried.state(None), None)
    assert (own.last_epoch, own.step_size) == (3, 50)


def test_schedulers_are_found_while_another_thread_builds_tuples():
    """CPython resizes a tuple that it builds of an iterator: a second reference to it, of anyone, is a SystemError."""
    interval, ended = sys.getswitchinterval(), Event()
    optimizer = adam()
    own = {StepLR(optimizer, step_size=2), ReduceLROnPlateau(optimizer)}

    def build():
        while not ended.is_set():
            tuple(number for number in range(200))

    with ThreadPoolExecutor() as pool:
        other = pool.submit(build)
        sys.setswitchinterval(1e-5)
        try:
            found = [find_schedulers([optimizer]) for _ in range(10)]
        finally:
            sys.setswitchinterval(interval)
            ended.set()
        other.result()
    assert all(set(one) == own for one in found)
