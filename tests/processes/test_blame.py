"""Who made a run slow, in real processes: 200 ms in one worker's backward pass, or in its input."""

from functools import partial

import numpy as np
import pytest

import paceline as pl
from paceline.observe.blame import blame
from processes.blame_programs import SLEEP_S, train

WAITING = ["all-reduce", "d-psgd", "parameter-server"]
METHODS = [*WAITING, "ad-psgd", "parameter-server(mode=async)", "hogwild"]


def launched(algorithm, fault, **more):
    return pl.launch(partial(train, 1, fault, **more), workers=3, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", METHODS)
@pytest.mark.parametrize("fault", ["computing", "input"])
def test_a_sleep_is_blamed_on_the_worker_that_slept(algorithm, fault):
    cause = blame(launched(algorithm, fault)).cause
    assert (cause.worker, cause.activity) == (1, fault)
    assert cause.own_s >= SLEEP_S


def test_input_of_a_loop_with_its_own_batches():
    run = launched("all-reduce", "input", deals_batches=False)
    assert np.median(run.records[1]["input_s"]) >= SLEEP_S
    cause = blame(run).cause
    assert (cause.worker, cause.activity) == (1, "input")


def test_workers_count_the_time_that_they_wait_for_servers():
    """Two of three workers wait for the third one's gradient, in which it sleeps."""
    run = launched("parameter-server", "computing")
    for worker in (0, 2):
        rows = run.records[worker][1:-1]
        assert np.median(rows["wait_s"]) > SLEEP_S / 2
        assert (rows["partner"] == 3).all()  # the server
        assert (rows["partner_s"] <= rows["wait_s"] + 1e-3).all()
