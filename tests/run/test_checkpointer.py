"""When a checkpoint counts as complete."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.algorithms import Hogwild, LocalSGD, Lockstep
from paceline.memory.seats import Seats
from paceline.model_parallel.graph.program import PlacedProgram
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from paceline.records.checkpoint_contents import Parameters
from paceline.run.checkpointer import Checkpointer
from paceline.worker.supervised import Outcome, WorkerState


class SupervisorOfTwo:
    """As much of a supervisor as a checkpointer looks at: two workers and what was written and drained of their records."""

    def __init__(self):
        self.workers = [WorkerState(worker) for worker in (0, 1)]
        self.algorithm = Hogwild()
        plan = SimpleNamespace(num_servers=0, seats=Seats(num_parts=1, num_workers=2, num_servers=0))
        self.arena = SimpleNamespace(store=lambda name, value: None, plan=plan, axes=None)
        self.written = [0, 0]
        self.read = [0, 0]
        self.outcome = Outcome()
        self.spool = SimpleNamespace(failure="", num_written=self.written.__getitem__, num_read=self.read.__getitem__)

    @property
    def goes_on(self):
        return self.algorithm.survivors_continue

    def drain(self):
        self.read[:] = self.written


@pytest.fixture
def ready(tmp_path):
    """A checkpointer, its supervisor and a way to look, with every part of checkpoint 20 written and 7 and 9 records."""
    checkpointer, supervisor = Checkpointer(tmp_path, every_s=0), SupervisorOfTwo()
    checkpoint.save_parameters(tmp_path, 20, Parameters(torch.zeros(2), 16, 20, {}))
    for worker in (0, 1):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        checkpoint.save_worker(tmp_path, 20, worker, optimizer, taken=8)
    supervisor.written[:] = 7, 9

    def look():
        checkpointer.tick(supervisor, 1.0, 1.0, lambda number, workers: {"samples": 5})
        return (tmp_path / "20" / "complete.json").exists()

    return supervisor, look


def test_every_update_in_a_checkpoint_is_on_record_before_it_counts(ready):
    """A program that is killed right after the mark would otherwise go on from updates that nobody has recorded."""
    supervisor, look = ready
    supervisor.drain()
    supervisor.written[:] = 8, 10  # the parts were written between the drain and the look
    assert not look()
    supervisor.drain()  # what was written then; the update before may still be without its record
    assert not look()
    supervisor.written[0] += 1
    supervisor.drain()
    assert not look(), "worker 1 may be between its update and its record"
    supervisor.written[1] += 1
    assert not look(), "written is not drained"
    supervisor.drain()
    assert look()


def test_a_worker_that_ends_holds_no_checkpoint_up(ready):
    supervisor, look = ready
    supervisor.drain()
    assert not look()
    supervisor.written[0] += 1
    supervisor.drain()
    assert not look()
    supervisor.workers[1].ended = True
    assert look()


def test_a_newcomer_that_enters_after_the_others_have_written_their_parts_gets_one(ready, tmp_path):
    supervisor, look = ready
    supervisor.algorithm = Lockstep()
    for file in (tmp_path / "20").glob("worker-1.*"):
        file.unlink()
    supervisor.workers[1].waits = True
    supervisor.drain()
    assert not look()
    supervisor.workers[1].waits = False
    supervisor.written[:] = 8, 10
    supervisor.drain()
    assert look()
    assert (tmp_path / "20" / "worker-1.pt").exists()


@pytest.mark.parametrize(("algorithm", "num_parts"), [(LocalSGD(), 1), (PlacedProgram(), 1), (Hogwild(), 2)])
def test_the_part_of_a_worker_that_was_lost_is_needed(algorithm, num_parts, ready, tmp_path):
    """The survivors' parts alone would make a checkpoint that only so many workers could go on from.

    Of a placed model, or of a replica whose workers have its parts, they would lack what only the lost worker had.
    """
    supervisor, look = ready
    supervisor.algorithm = algorithm
    supervisor.arena.plan.seats = Seats(num_parts=num_parts, num_workers=2, num_servers=0)
    supervisor.workers[1].ended = True
    (tmp_path / "20" / "worker-1.pt.sha256").rename(tmp_path / "part")
    for _ in range(3):
        supervisor.written[0] += 1
        supervisor.drain()
        assert not look()
    (tmp_path / "part").rename(tmp_path / "20" / "worker-1.pt.sha256")
    assert not look()
    supervisor.written[0] += 1
    supervisor.drain()
    assert look()
    assert checkpoint_files.describe(tmp_path / "20")["workers"] == [0, 1]


def test_where_others_go_on_a_survivors_part_stands_in_for_the_dead_workers(ready, tmp_path):
    supervisor, look = ready
    supervisor.algorithm = Lockstep()
    supervisor.workers[1].lost = True
    for name in ("worker-1.pt", "worker-1.pt.sha256"):
        (tmp_path / "20" / name).unlink()
    supervisor.drain()
    assert not look(), "worker 0 may be between its update and its record"
    supervisor.written[0] += 1
    supervisor.drain()
    assert look()
    assert checkpoint_files.describe(tmp_path / "20")["workers"] == [0, 1]
    assert [one["taken"] for one in checkpoint.load_workers(tmp_path / "20")] == [8, 8]
