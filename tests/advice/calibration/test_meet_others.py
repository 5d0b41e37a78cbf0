"""Workers that were invited to calibrate meet at the join point, as threads, and are numbered as they come."""

import threading
from pathlib import Path

import pytest

import forked
import leftovers
from paceline.advice.calibration.cluster import meet_others
from paceline.cli.launch import _calibrates
from paceline.errors import PacelineError, UsageError
from paceline.membership.environment import Invitation
from processes.join_programs import free_address

DEADLINE_S = forked.AGAINST_HANGS_S


def invited(address, of, deadline_s=DEADLINE_S):
    return Invitation(num_workers=of, address=address, of=of, deadline_s=deadline_s)


def meet(number, of, deadline_s=DEADLINE_S):
    found, address = [None] * number, free_address()
    over = threading.Barrier(of)

    def one(index):
        try:
            with meet_others(invited(address, of, deadline_s)) as group:
                found[index] = (group.worker_id, group.num_workers, group.gather(group.worker_id))
                over.wait(DEADLINE_S)  # the holder of the join point must not go before a late comer has asked there
        except PacelineError as error:
            found[index] = error
            over.abort()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("number", [1, 3])
def test_numbers_are_given_once_each(number):
    before = leftovers.everything()
    found = sorted(meet(number, number), key=lambda one: one[0])
    assert found[0] == (0, number, list(range(number)))
    assert [one[0] for one in found] == list(range(number))
    leftovers.assert_nothing_new(before)


def test_a_worker_that_does_not_come_is_named():
    (error,) = meet(1, 2, deadline_s=1)
    assert str(error) == "After 1 s worker 1 has not come. All 2 workers are needed."
    assert not isinstance(error, UsageError)


@pytest.mark.parametrize(
    ("command", "calibrates"),
    [
        ("-m paceline calibrate --quick", True),
        (f"{Path('bin') / 'paceline'} calibrate", True),
        ("-m paceline train", False),
        ("-m calibrate", False),
        ("train.py paceline calibrate", False),
        ("-m", False),
    ],
)
def test_launch_makes_no_run_of_a_calibration(command, calibrates):
    assert _calibrates(command.split()) == calibrates
