"""A run whose evaluating process has died says why, once its supervisor has learnt what became of worker 0."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from paceline.algorithms import registry
from paceline.memory.arena import Arena, plan_arena
from paceline.memory.segment import Segment
from paceline.run.goal_watcher import GoalWatcher
from paceline.specs.goal import Goal
from paceline.worker.evaluation_channel import EvaluationChannel
from paceline.worker.supervised import Outcome, WorkerState


@pytest.fixture
def run():
    """A run, its watcher, and a process that was to evaluate it and has ended."""
    needs = registry.build("locked").needs
    plan = plan_arena(needs, num_workers=1, num_elements=64, dtype=torch.float32, extra=EvaluationChannel.EXTRA)
    arena = Arena(Segment.create(plan.size_bytes), plan, participant_id=1)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    EvaluationChannel(arena).tell_process(gone.pid)
    outcome = Outcome()
    recording = SimpleNamespace(
        supervisor=SimpleNamespace(arena=arena, outcome=outcome, workers=[WorkerState(0)]),
        goal=Goal(),
        samples=0,
        is_at_goal=lambda: False,
        loss=None,
        records=dict,
        decided=dict,
    )
    watcher = GoalWatcher(recording)
    yield SimpleNamespace(watcher=watcher, outcome=outcome, worker=recording.supervisor.workers[0])
    watcher.close()


def test_its_death_may_be_seen_before_that_of_worker_0(run):
    run.watcher.tick()
    assert run.outcome.notes == []
    run.worker.lost = True
    run.watcher.tick()
    run.watcher.tick()
    assert run.outcome.notes == ["Evaluations have ended with worker 0."]


def test_where_worker_0_lives_the_process_alone_is_named(run):
    run.watcher.tick()
    run.watcher.end()
    assert run.outcome.notes == ["Evaluations have ended, as the process that made them is gone."]


def test_a_thread_that_evaluates_and_dies_is_not_waited_for(run, monkeypatch):
    """The thread dies because JSON cannot hold what its evaluator returns."""

    class Untold:
        finite, loaded_s = True, 0.0

        def now(self, arena, about):
            return {"accuracy": object()}

        def worst_worker_accuracy(self, arena):
            return None

    monkeypatch.setattr(threading, "excepthook", lambda of_thread: None)
    run.watcher._evaluator = Untold()
    run.watcher.tick()
    run.watcher.end()
    assert run.outcome.notes == ["Evaluations have ended, as the thread that made them is gone."]
