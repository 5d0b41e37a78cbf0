"""In which order a supervisor hears of a death does not matter."""

from types import SimpleNamespace

from paceline.run.config import TrainConfig
from paceline.run.earlier_part import EarlierPart
from paceline.run.loops import Loop
from paceline.run.supervisor import Supervisor
from paceline.specs.goal import Goal
from paceline.worker.process import Failure


def test_a_survivor_may_complain_before_the_death_that_it_follows_from_is_noticed():
    loop = Loop(function=print, config=TrainConfig(workers=4), algorithm=None, goal=Goal(), command="")
    supervisor = Supervisor(loop, None, EarlierPart.of(None), on_tick=None, on_end=None)
    worker_1, worker_3 = supervisor.workers[1], supervisor.workers[3]
    worker_1.handle = SimpleNamespace(pid=1, join=lambda *timeout: None, exitcode=-9, is_alive=lambda: False)
    worker_1.connection = SimpleNamespace(close=lambda: None)
    supervisor._fail(worker_3, Failure("worker-lost", "D-PSGD round 5: worker 2 did not send its model."))
    supervisor._lose(worker_1)
    assert supervisor.outcome.reason == (
        "Worker 1 was ended by signal 9. D-PSGD round 5: worker 2 did not send its model."
    )
