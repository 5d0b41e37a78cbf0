"""Runs whose servers are killed at chosen or random instants, with gradients that are known integers."""

import os
import signal
from unittest import mock

import numpy as np
import torch

import paceline as pl
from contracts.programs import AddUp, planted
from paceline.data.plan import BatchPlan
from paceline.run.supervisor import Supervisor

SIZE = 3_000
EPOCHS = 1000  # runs are stopped


def weight_values(parameters, size=SIZE):
    """The values that the model's weight has; it is the vector's first parameter, behind 64 bytes of padding."""
    first = 64 // parameters.x.element_size()
    return parameters.x[first : first + size].unique().tolist()


def batch_sums(rows, seed=0):
    """What each row's batch adds to every parameter."""
    values = torch.tensor(planted())
    plan = BatchPlan(num_samples=len(values), batch_size=2, seed=seed)
    return np.array([values[plan.indices(int(batch))].sum().item() for batch in rows["batch"]])


def planted_sum(rows, seed=0):
    return batch_sums(rows, seed).sum()


def run_watched(algorithm, look, *, workers=3, epochs=EPOCHS, size=SIZE, program=AddUp):
    """Trains; `look` is called with the supervisor at its news, and every 50 ms. Returns the run and the final parameters."""
    kept = []

    class Kept(Supervisor):
        def run(self):
            kept.append(self)
            super().run()

        def _wait_for_news(self):
            super()._wait_for_news()
            if self.started_s is not None and self.servers.states and self.servers.states[0].handle is not None:
                look(self)

    with mock.patch("paceline.run.driver.Supervisor", Kept):
        run = pl.launch(program(size, epochs=epochs), workers=workers, algorithm=algorithm)
    return run, kept[0].parameters(0)


def run_and_kill_shards(algorithm, *, kill_at, **settings):
    """Trains; kills a server when its shard has come to a version, for each (server, version) of `kill_at` in turn.

    The run is stopped 100 versions after the last death has been got over. Second copies count on after the servers. With
    them, nobody is killed before that either.
    """
    left = list(kill_at)
    goes_on_until = []

    def look(supervisor):
        server, version = left[0] if left else (0, 0)
        if supervisor.servers.restarts < len(kill_at) - len(left):
            return  # the last death has not been noticed
        if not recovered(supervisor, server % algorithm.shards) or version_of(supervisor, server) < version:
            return
        if left:
            os.kill(pid_of(supervisor, server), signal.SIGKILL)
            del left[0]
        elif not goes_on_until:
            goes_on_until.append(version_of(supervisor, 0) + 100)
        elif version_of(supervisor, 0) >= goes_on_until[0]:
            supervisor.stop()

    run, parameters = run_watched(algorithm, look, **settings)
    assert not left
    return run, parameters


def version_of(supervisor, server):
    return supervisor.arena.shared.counts()[server % supervisor.arena.plan.num_servers]["version"]


def pid_of(supervisor, server):
    return supervisor.servers.states[server].handle.pid


def recovered(supervisor, shard):
    """Whether a shard's second copy, where it has one, has all that its server has answered."""
    states, shards = supervisor.servers.states, supervisor.arena.plan.num_servers
    return len(states) == shards or supervisor.arena.shared.named_copy(shard) == states[shards + shard].incarnation


def check_every_update_once(run, parameters, *, size=SIZE, restarts):
    """With `durability=replica`: every gradient is in the parameters once, and no version is missing or made twice."""
    rows = check_versions(run, parameters, restarts=restarts)
    assert weight_values(parameters, size) == [planted_sum(rows)]


def check_versions(run, parameters, *, restarts):
    """No version is missing or made twice; returns the records."""
    result = run.result
    assert (result["outcome"], result["server_restarts"]) == ("stopped", restarts), result["outcome_reason"]
    assert result["lost_updates"] == 0
    rows = np.concatenate(list(run.records.values()))
    assert len(set(rows["batch"])) == len(rows)
    assert sorted(rows["applied_version"]) == list(range(1, len(rows) + 1))
    assert parameters.version == len(rows)
    return rows


def check_reported_losses(run, parameters, *, size=SIZE, restarts, workers=3, push=1):
    """With snapshots: the parameters hold what was applied, less what is reported as lost; nothing twice.

    An update is of up to `push` gradients.
    """
    kept = check_losses(run, restarts=restarts, workers=workers, push=push)
    assert weight_values(parameters, size) == [planted_sum(kept)]


def check_losses(run, *, restarts, workers=3, push=1):
    """Nothing is applied twice; returns the records of what is not reported as lost."""
    result = run.result
    assert (result["outcome"], result["server_restarts"]) == ("stopped", restarts), result["outcome_reason"]
    rows = np.concatenate(list(run.records.values()))
    assert len(set(rows["batch"])) == len(rows)
    lost = np.zeros(len(rows), bool)
    for _, first, last in result["lost_versions"]:
        lost |= (rows["applied_version"] >= first) & (rows["applied_version"] <= last)
    versions, gradients = np.unique(rows["applied_version"], return_counts=True)
    assert gradients.max() <= push, "no version is made twice"
    assert (gradients == push).sum() >= len(versions) - (0 if push == 1 else workers), (
        "only the last of each may be of fewer"
    )
    # A worker whose answer was lost has sent its gradient again.
    assert 0 <= result["lost_updates"] - len(np.unique(rows["applied_version"][lost])) <= restarts * workers
    return rows[~lost]
