"""Workers whose models count as ones on a device join a run, train in rounds, and go on without those that are killed."""

import signal

import pytest

from lazy_copies import LazyCopies, MetaCopies
from processes import test_join_d_psgd as d_psgd
from processes import test_join_rounds as rounds
from processes.local_reference import LATE, STREAM
from processes.survivors import Survivors
from processes.test_launch_on_device import DILOCO, Loop

REPLACED = {"kills": {1: 2}, "newcomers": {4: {1: 1}}, "num_batches": 30, "copies": LazyCopies}


@pytest.mark.parametrize("method", ["lockstep", "all-reduce"])
def test_a_replacement_in_rounds_of_gradients(method, tmp_path):
    rounds.check(rounds.Crew(Survivors(tmp_path, algorithm=method, optimizer="adam", **REPLACED), replacements=1))


@pytest.mark.parametrize("method", [LATE, STREAM], ids=lambda one: one.spec)
def test_a_replacement_between_local_steps(method, tmp_path):
    crew = rounds.Crew(Survivors(tmp_path, algorithm=method.spec, **REPLACED), replacements=1)
    rounds.check_local(method, crew)


def test_a_replacement_in_rounds_of_neighbours(tmp_path):
    d_psgd.check(rounds.Crew(d_psgd.program(tmp_path, **REPLACED), replacements=1))


class Joining(Loop):
    """Workers of a run in which one may be killed."""

    def __init__(self, folder, algorithm, dies_at=None):
        super().__init__(MetaCopies, dies_at, algorithm=algorithm)
        self.folder = folder


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "local-sgd(period=2)", "da-sgd(period=2)", DILOCO])
def test_no_operation_has_vectors_of_a_device_and_of_the_host(algorithm, tmp_path):
    """Worker 1 is killed, and the others wait for its replacement."""
    crew = rounds.Crew(Joining(tmp_path, algorithm, dies_at=3), replacements=1, min_workers=rounds.WORKERS)
    codes = crew.run()
    assert codes == [-signal.SIGKILL, 0, 0, 0], [path.read_text() for path in tmp_path.glob("error-*")]


@pytest.mark.parametrize("algorithm", ["d-psgd", "ad-psgd"])
def test_no_operation_of_neighbours_has_either(algorithm, tmp_path):
    assert rounds.Crew(Joining(tmp_path, algorithm)).run() == [0, 0, 0]
