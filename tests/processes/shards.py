"""Runs whose servers are killed at chosen or random instants, with gradients that are known integers."""

import os
import signal
from unittest import mock

import numpy as np
import torch

import paceline as pl
from contracts.programs import PLANTED, SAMPLES, AddUp
from paceline.batches import BatchPlan
from paceline.supervisor import Supervisor

SIZE = 3_000
EPOCHS = 40


def batch_sums(rows, seed=0):
    """What each row's batch adds to every parameter."""
    plan, values = BatchPlan(num_samples=SAMPLES, batch_size=2, seed=seed), torch.tensor(PLANTED)
    return np.array([values[plan.indices(int(batch))].sum().item() for batch in rows["batch"]])


def planted_sum(rows, seed=0):
    return batch_sums(rows, seed).sum()


def run_and_kill_shards(algorithm, *, kill_at, workers=3, epochs=EPOCHS, size=SIZE, together=False):
    """Trains; kills a server when its shard has come to a version, for each (server, version) of `kill_at` in turn.

    Second copies count on after the servers. With them, nobody is killed before the last death has been got over, unless all
    are to die `together`, as the first one's turn has come.
    """
    kept, left = [], list(kill_at)

    class Kept(Supervisor):
        def run(self):
            kept.append(self)
            super().run()

        def _wait_for_news(self):
            super()._wait_for_news()
            while left and self.started_s is not None and self._is_due(*left[0]):
                server, _ = left.pop(0)
                os.kill(self.servers.states[server].handle.pid, signal.SIGKILL)
                if together and left:
                    left[0] = (left[0][0], 0)
                else:
                    break

        def _is_due(self, server, version):
            states, shards = self.servers.states, algorithm.shards
            if len(states) <= server or states[server].handle.pid is None:
                return False
            shard, at_once = server % shards, together and version == 0
            recovered = len(states) == shards or (
                self.arena.shared.named_copy(shard) == states[shards + shard].incarnation
            )
            if not recovered and not at_once:
                return False
            return self.arena.shared.counts()[shard]["version"] >= version

    with mock.patch("paceline.launcher.Supervisor", Kept):
        run = pl.launch(AddUp(size, epochs=epochs), workers=workers, algorithm=algorithm)
    assert not left
    return run, kept[0].parameters(0)


def check_every_update_once(run, parameters, *, size=SIZE, restarts):
    """With `durability=replica`: every gradient is in the parameters once, and no version is missing or made twice."""
    result = run.result
    assert (result["outcome"], result["server_restarts"]) == ("stopped", restarts), result["outcome_reason"]
    assert result["lost_updates"] == 0
    rows = np.concatenate(list(run.records.values()))
    assert sorted(rows["batch"]) == list(range(len(rows)))
    assert sorted(rows["applied_version"]) == list(range(1, len(rows) + 1))
    assert parameters.version == len(rows)
    assert parameters.x[:size].unique().tolist() == [planted_sum(rows)]


def check_reported_losses(run, parameters, *, size=SIZE, restarts, workers=3):
    """With snapshots: the parameters hold what was applied, less what is reported as lost; nothing twice."""
    result = run.result
    assert (result["outcome"], result["server_restarts"]) == ("stopped", restarts), result["outcome_reason"]
    rows = np.concatenate(list(run.records.values()))
    assert sorted(rows["batch"]) == list(range(len(rows)))
    lost = np.zeros(len(rows), bool)
    for _, first, last in result["lost_versions"]:
        lost |= (rows["applied_version"] >= first) & (rows["applied_version"] <= last)
    assert len(set(rows["applied_version"])) == len(rows), "no version is made twice"
    # A worker whose answer was lost has sent its gradient again.
    assert 0 <= result["lost_updates"] - lost.sum() <= restarts * workers
    assert parameters.x[:size].unique().tolist() == [planted_sum(rows[~lost])]
