"""A worker or server that stands still (SIGSTOP), as a laptop's lid or a busy machine makes it, is not taken for dead."""

import os
import random
import signal
import time

import pytest
import torch

import leftovers
import paceline as pl
import soak_results
from model_parallel.models import placed, planned
from paceline.run.supervisor import Supervisor
from processes.drill import WORKERS, Drill

PAUSES = 10
METHODS = [
    "lockstep",
    "all-reduce",
    "all-reduce(sharded=true)",
    "local-sgd",
    "da-sgd",
    "diloco",
    "d-psgd",
    "ad-psgd",
    "parameter-server",
    "parameter-server(mode=sync(backups=1), shards=2)",
    "parameter-server(mode=async)",
    "parameter-server(mode=async, durability=replica)",
    "downpour",
    "adaptive-revision",
]


class Pauses:
    """Stops processes of a drill one after the other, drawn from `draws`, each for a time drawn from `lengths_s`."""

    def __init__(self, draws, number, lengths_s):
        self.draws, self.left, self.lengths_s = draws, number, lengths_s
        self.stopped = None
        self.at_version = 100
        self.longest_s = 0.0
        self.supervisor = None

    def __call__(self, progress):
        """Called at every look at the run; returns whether all pauses are over."""
        if self.stopped is not None:
            if time.monotonic() >= self.wake_s:
                os.kill(self.stopped, signal.SIGCONT)
                self.stopped, self.at_version = None, progress.version + self.draws.randrange(50, 200)
        elif progress.version >= self.at_version:
            if not self.left:
                return True
            self.left -= 1
            self.stopped = self.draws.choice(self._processes())
            length_s = self.draws.uniform(*self.lengths_s)
            self.longest_s = max(self.longest_s, length_s)
            self.wake_s = time.monotonic() + length_s
            os.kill(self.stopped, signal.SIGSTOP)
        return False

    def _processes(self):
        return [one.handle.pid for one in (*self.supervisor.workers, *self.supervisor.servers.states)]


class Watched(Supervisor):
    """Tells `pauses` of itself."""

    pauses = None

    def run(self):
        self.pauses.supervisor = self
        super().run()


def check(method, pauses, run):
    """Nothing is lost; writes that to PACELINE_SOAK_RESULTS."""
    result = run.result
    assert (result["outcome"], result["outcome_reason"]) == ("stopped", ""), result["outcome_reason"]
    assert result["workers_lost"] == []
    assert result["restarts"] == result.get("server_restarts", 0) == 0
    assert result["records_lost"] == 0
    batches = [batch for rows in run.records.values() for batch in rows["batch"][rows["samples"] > 0]]
    assert len(batches) == len({*batches})
    figures = {"pauses": PAUSES, "longest_s": round(pauses.longest_s, 1), "lost": len(result["workers_lost"])}
    soak_results.keep("soak_pauses", method, figures)


@pytest.fixture
def pauses(monkeypatch, request):
    """Ten of them."""
    pauses = Watched.pauses = Pauses(random.Random(request.node.name), PAUSES, (1.0, 20.0))
    monkeypatch.setattr("paceline.run.driver.Supervisor", Watched)
    before = leftovers.everything()
    yield pauses
    pauses.supervisor = Watched.pauses = None  # it has the run's memory
    leftovers.assert_nothing_new(before)


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
def test_ten_pauses(method, pauses):
    drill = Drill(method, workers=4 if pl.parse(method).gossip else WORKERS, until=pauses)
    run = drill.run()
    assert run.result["torn_updates"] == 0
    assert torch.isfinite(drill.parameters.x).all()
    check(method, pauses, run)


@pytest.mark.soak
@pytest.mark.parametrize("method", ["a placed model"])
def test_ten_pauses_of_parts_of_a_model(method, pauses, tmp_path):
    def look(progress):
        if pauses(progress):
            pauses.supervisor.stop()

    run, found = placed("two towers", planned("two towers", 2), tmp_path, loop={"epochs": 100_000}, on_progress=look)
    assert all(torch.isfinite(value).all() for _, state in found for value in state.values())
    check(method, pauses, run)
