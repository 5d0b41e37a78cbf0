"""Workers whose models count as ones on a device join a run, train in rounds, and go on without those that are killed."""

import signal

import pytest

from lazy_copies import LazyCopies, MetaCopies
from processes import test_join_d_psgd as d_psgd
from processes import test_join_rounds as rounds
from processes.local_reference import LATE, STREAM
from processes.survivors import Survivors
from processes.test_launch_on_device import Loop

KILLED = {1: 2}


def replaced(program):
    return rounds.Crew(program, replacements=1, copies=LazyCopies)


@pytest.mark.parametrize("method", ["lockstep", "all-reduce"])
def test_a_replacement_in_rounds_of_gradients(method, tmp_path):
    rounds.check(replaced(Survivors(tmp_path, KILLED, method, newcomers={4: {1: 1}}, optimizer="adam", num_batches=30)))


@pytest.mark.parametrize("method", [LATE, STREAM], ids=lambda one: one.spec)
def test_a_replacement_between_local_steps(method, tmp_path):
    rounds.check_local(
        method, replaced(Survivors(tmp_path, KILLED, method.spec, newcomers={4: {1: 1}}, num_batches=30))
    )


def test_a_replacement_in_rounds_of_neighbours(tmp_path):
    d_psgd.check(replaced(d_psgd.program(tmp_path, KILLED, newcomers={4: {1: 1}}, num_batches=30)))


class Joining(Loop):
    """Workers of a run in which one may be killed."""

    def __init__(self, folder, algorithm):
        super().__init__(MetaCopies, algorithm=algorithm)
        self.folder = folder


@pytest.mark.parametrize(
    "algorithm",
    [
        *("lockstep", "all-reduce", "local-sgd(period=2)", "da-sgd(period=2)", "diloco(period=4, fragments=2)"),
        *("d-psgd", "ad-psgd"),
    ],
)
def test_no_operation_has_vectors_of_a_device_and_of_the_host(algorithm, tmp_path):
    crew = rounds.Crew(Joining(tmp_path, algorithm), {2: (9, signal.SIGKILL)} if algorithm != "ad-psgd" else {})
    codes = crew.run()
    assert codes in ([0, 0, 0], [-signal.SIGKILL, 0, 0]), [path.read_text() for path in tmp_path.glob("error-*")]
