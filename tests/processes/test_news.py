"""In which order a supervisor hears of deaths and errors does not matter."""

from types import SimpleNamespace

import pytest

from paceline.run.config import TrainConfig
from paceline.run.earlier_part import EarlierPart
from paceline.run.loops import Loop
from paceline.run.supervisor import Supervisor
from paceline.specs.goal import Goal
from paceline.worker.process import Failure


@pytest.fixture
def supervisor():
    loop = Loop(function=print, config=TrainConfig(workers=4), algorithm=None, goal=Goal(), command="")
    return Supervisor(loop, None, EarlierPart.of(None), on_tick=None, on_end=None)


def test_a_survivor_may_complain_before_the_death_that_it_follows_from_is_noticed(supervisor):
    worker_1, worker_3 = supervisor.workers[1], supervisor.workers[3]
    worker_1.handle = SimpleNamespace(pid=1, join=lambda *timeout: None, exitcode=-9, is_alive=lambda: False)
    worker_1.connection = SimpleNamespace(close=lambda: None)
    supervisor.fail(worker_3, Failure("worker-lost", "D-PSGD round 5: worker 2 did not send its model."))
    supervisor._lose(worker_1)
    assert supervisor.outcome.reason == (
        "Worker 1 was ended by signal 9. D-PSGD round 5: worker 2 did not send its model."
    )


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_error_is_the_cause_of_a_loss_unless_an_earlier_death_can_be(supervisor, goes_on, monkeypatch):
    """Where the others go on without worker 1, its death does not explain why worker 0 is missing."""
    monkeypatch.setattr(Supervisor, "goes_on", goes_on)
    supervisor.outcome.workers_lost.append(1)
    supervisor.outcome.notes.append("Worker 1 was ended by signal 9.")
    supervisor.fail("", Failure("worker-lost", "Worker 0 did not arrive."))
    supervisor.fail("Worker 0: ", Failure("error", "KeyError: 'label 17'"))
    expected = ["Worker 1 was ended by signal 9. Worker 0 did not arrive.", "Worker 0: KeyError: 'label 17'"]
    assert supervisor.outcome.reason == expected[goes_on]
