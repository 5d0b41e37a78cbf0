"""A run in which workers are killed at chosen or random instants, seen through to its end; its loss is convex."""

import math
import os
import signal

import torch

import paceline as pl
from contracts.linear_task import LINEAR
from paceline.run.config import TrainConfig
from paceline.run.train import prepared

WORKERS = 3
METHODS = [
    "lockstep",
    "all-reduce",
    "locked",
    "locked(backoff=exponential)",
    "locked(kind=rwlock)",
    "locked(kind=rwlock, backoff=exponential)",
    "hogwild",
    "hogwild(reads=copy)",
    "leashed",
    "leashed(persistence=0)",
    "leashed(backoff=exponential)",
    "local-sgd",
    "d-psgd",
    "ad-psgd",
    "ad-psgd(topology=complete, peers=rotate)",
    "parameter-server",
    "parameter-server(mode=sync(backups=1), shards=2)",
    "parameter-server(mode=async)",
    "parameter-server(mode=async, durability=replica)",
    "parameter-server(mode=bounded(clock_bound=2), shards=2)",
    "downpour",
    "downpour(fetch=3, push=3, warm_start_steps=60, shards=2)",
    "adaptive-revision",
]


class Drill:
    """Trains without an end, kills, and stops the run once it went on for a while.

    Args:
        algorithm: spec.
        kill: worker -> number of its records after which it is killed.
        apart: versions that the run makes after a death that it has noticed, before the next worker is killed; None: each is
            killed when its turn has come, and a supervisor that was waiting for a core kills several at once.
        until: version at which the run is stopped, if nothing else ends it before; or a function of the progress.
        resume: a run to go on with, in its folder.
        config: further fields of `TrainConfig`.
    """

    def __init__(self, algorithm, *, kill=(), apart=None, until=600, resume=None, **config):
        config = {"task": LINEAR, "workers": WORKERS, "epochs": 10_000, **config}
        self.training = prepared(
            TrainConfig(algorithm=algorithm, **config), resume, resume, on_progress=self._look, progress_every_s=0.0
        )  # looks at every look of the supervisor's own
        self.to_kill = dict(kill)
        self.apart = apart
        self.killed_at = {}
        self.back = set()
        self.until = until

    def run(self):
        run = self.training.run()
        self.parameters = self.supervisor.parameters(0)
        return run

    @property
    def supervisor(self):
        return self.training.supervisor

    def is_back(self, worker_id):
        """Whether the supervisor has seen records of the worker's second process."""
        fresh = self.supervisor.spool.fresh[worker_id]
        if len(fresh) and fresh["incarnation"].max() > 0:
            self.back.add(worker_id)
        return worker_id in self.back

    def _look(self, progress):
        for worker in progress.workers:
            if worker.worker_id in self.to_kill and self._is_its_turn(worker, progress):
                del self.to_kill[worker.worker_id]
                self.killed_at[worker.worker_id] = progress.version
                os.kill(self.supervisor.workers[worker.worker_id].handle.pid, signal.SIGKILL)
        begun = all(one.steps > 0 for one in progress.workers if one.worker_id not in self.killed_at)
        gone = len(self.supervisor.outcome.workers_lost) >= len(self.killed_at)
        if not self.to_kill and gone and begun and self._long_enough(progress):
            self.supervisor.stop()

    def _is_its_turn(self, worker, progress):
        if self.apart is not None and self.killed_at:
            is_noticed = len(self.supervisor.outcome.workers_lost) == len(self.killed_at)
            if not is_noticed or progress.version < max(self.killed_at.values()) + self.apart:
                return False
        return worker.steps > self.to_kill[worker.worker_id]

    def _long_enough(self, progress):
        if callable(self.until):
            return self.until(progress)
        return progress.version >= max([self.until, *(at + 200 for at in self.killed_at.values())])


def kill_one(algorithm, random):
    """One drill with a worker and an instant drawn from `random`; checks how the run ended and returns it."""
    workers = 4 if pl.parse(algorithm).gossip else WORKERS  # four on a ring: a neighbour of the dead one has another
    victim, steps = random.randrange(workers), random.randrange(150)
    drill = Drill(algorithm, kill={victim: steps}, workers=workers)
    run = drill.run()
    result = run.result
    assert victim in drill.killed_at
    assert result["workers_lost"] == [victim]
    assert torch.isfinite(drill.parameters.x).all()
    assert math.isfinite(result["train_loss"])
    assert len(run.records[victim]) > steps
    method = pl.parse(algorithm)
    if method.lockstep and not method.survivors_continue:
        assert result["outcome"] == "crashed"
        # A survivor may have waited for another survivor that had left: what is always said, and first, is which died.
        assert f"Worker {victim} was ended by signal 9." in result["outcome_reason"], result["outcome_reason"]
        assert "did not" in result["outcome_reason"], result["outcome_reason"]
    else:
        assert result["outcome"] == "stopped", result["outcome_reason"]
        assert result["test_accuracy"] > 0.7
        survivors = [len(rows) for worker, rows in run.records.items() if worker != victim]
        assert min(survivors) > 0
        assert result["torn_updates"] <= 1
    return run
