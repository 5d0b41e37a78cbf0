"""`durability=replica` in real processes: whichever process of a shard dies, every update is made exactly once."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import leftovers
import paceline as pl
import soak_results
from contracts.programs import NUM_BATCHES, AddUp
from paceline.algorithms.server.apply import SGD
from paceline.algorithms.server.user import UserOptimizer
from paceline.membership.launched import check_algorithm
from paceline.memory import sequence
from paceline.memory.failpoints import ENVIRONMENT_VARIABLE
from processes.shards import (
    SIZE,
    batch_sums,
    check_every_update_once,
    check_reported_losses,
    pid_of,
    recovered,
    run_and_kill_shards,
    run_watched,
    version_of,
    weight_values,
)

REPLICA = pl.ParameterServer(mode=pl.Async(), durability="replica")
SERVER, COPY = 0, 1
SOAK = {
    "snapshot": pl.ParameterServer(mode=pl.Async(), snapshot_s=0.05),
    "snapshot, one at every update": pl.ParameterServer(mode=pl.Async(), snapshot_s=0.0),
    "replica": REPLICA,
    "replica, the copy too": REPLICA,
}


def test_a_shard_is_killed_and_no_update_is_lost_or_made_twice():
    """Its copy takes over; once that has a copy of its own, it is killed as well. `make soak` does so 25 times."""
    at = random.Random("replica 0").randrange(20, 300)
    run, parameters = run_and_kill_shards(REPLICA, kill_at=[(SERVER, at), (SERVER, at + 300)])
    check_every_update_once(run, parameters, restarts=2)
    assert sum("took over" in note for note in run.result["notes"]) == 2


def test_the_copy_is_killed_and_then_the_server():
    run, parameters = run_and_kill_shards(REPLICA, kill_at=[(COPY, 100), (SERVER, 200), (COPY, 300), (COPY, 301)])
    check_every_update_once(run, parameters, restarts=4)


@pytest.mark.parametrize("point", ["served.mid_write@3#333", "copy.mid_write@4#333"])
def test_killed_in_the_middle_of_an_update(point, monkeypatch):
    """One of the two has the update already, the other not yet, and no worker was answered."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, point)
    run, parameters = run_watched(REPLICA, lambda _: None, epochs=12)
    check_every_update_once(run, parameters, restarts=1)


def test_nobody_is_answered_before_the_copy_has_it():
    """SIGSTOP to the copy: the server stands still with it. Then the server dies, and the copy, woken up, takes over."""
    seen, killed = [], []

    def look(supervisor):
        version = version_of(supervisor, SERVER)
        if not seen:
            if version >= 200 and recovered(supervisor, 0):
                os.kill(pid_of(supervisor, COPY), signal.SIGSTOP)
                seen.append(version)
        # A look lasts as long as 50 updates otherwise. A server that waited for a core makes those yet that the copy has.
        elif len(seen) < 12 or len(set(seen[-10:])) > 1:
            seen.append(version)
        elif not killed:
            copy = pid_of(supervisor, COPY)
            os.kill(pid_of(supervisor, SERVER), signal.SIGKILL)
            os.kill(copy, signal.SIGCONT)
            killed.append(version)

    run, parameters = run_watched(REPLICA, look, epochs=40)
    assert killed, "the workers were answered, and went on"
    check_every_update_once(run, parameters, restarts=1)


def test_a_copy_that_takes_over_late_has_a_copy_of_its_own():
    """Stopped as the server dies, it can be found as the server only later: the next copy is not started before that."""
    turns = []

    def look(supervisor):
        servers = supervisor.servers
        if not turns and version_of(supervisor, SERVER) >= 200 and recovered(supervisor, 0):
            turns.append(pid_of(supervisor, COPY))
            os.kill(turns[0], signal.SIGSTOP)
            os.kill(pid_of(supervisor, SERVER), signal.SIGKILL)
        elif len(turns) == 1 and servers.restarts == 1:
            assert pid_of(supervisor, SERVER) == turns[0]
            turns.append(servers.states[COPY].handle)
            os.kill(turns[0], signal.SIGCONT)
        elif len(turns) == 2 and servers.states[COPY].handle is not None and recovered(supervisor, 0):
            turns.append(version_of(supervisor, SERVER))
            os.kill(turns[0], signal.SIGKILL)
        elif len(turns) == 3 and servers.restarts == 2 and version_of(supervisor, SERVER) >= turns[2] + 200:
            supervisor.stop()

    run, parameters = run_watched(REPLICA, look)
    assert turns[1] is None
    check_every_update_once(run, parameters, restarts=2)


def stop(pid):
    """Stops a process, and waits until it stands still."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


@pytest.mark.parametrize("writing", [False, True])
def test_both_are_killed_at_once_and_the_run_says_so(writing):
    """At once: workers do not wait for a successor's answer, nor for the end of the update."""
    killed_s = []

    def look(supervisor):
        if killed_s or version_of(supervisor, SERVER) < 200 or not recovered(supervisor, 0):
            return
        server, copy = pid_of(supervisor, SERVER), pid_of(supervisor, COPY)
        stop(server)
        while sequence.read_begin(supervisor.arena.shared._own_lock._word) % 2 != writing:
            os.kill(server, signal.SIGCONT)
            stop(server)
        killed_s.append(time.monotonic())
        os.kill(copy, signal.SIGKILL)
        os.kill(server, signal.SIGKILL)

    with pytest.raises(
        pl.PacelineError, match=r"Shard 0 of the server was ended by signal 9 while its second copy .* start a new run"
    ):
        run_watched(REPLICA, look)
    assert time.monotonic() - killed_s[0] < 45.0, "a worker that waited would do so for 60 s"


def test_shards_that_choose_together_stay_together():
    """Two of three gradients make a step, in both shards the same two, whichever shard dies; what is dropped is in neither."""
    algorithm = pl.ParameterServer(mode=pl.Sync(backups=1), shards=2, durability="replica")
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(1, 50), (0, 100), (1, 150), (0, 200)])
    result = run.result
    assert (result["outcome"], result["server_restarts"]) == ("stopped", 4), result["outcome_reason"]
    rows = np.concatenate(list(run.records.values()))
    rows = rows[rows["applied_version"] > 0]
    versions, sizes = np.unique(rows["applied_version"], return_counts=True)
    assert versions.tolist() == list(range(1, parameters.version + 1))
    totals = np.bincount(rows["applied_version"], batch_sums(rows))[1:]
    assert weight_values(parameters) == [(totals / sizes).sum()]
    assert [shard["version"] for shard in result["shards"]] == [parameters.version] * 2


@pytest.mark.parametrize(
    "algorithm",
    [
        pl.Downpour(apply=SGD(), durability="replica"),
        pl.Downpour(apply=SGD(), durability="replica", overlap=True),
        pl.Downpour(apply=UserOptimizer(), durability="replica", warm_start_steps=150),
    ],
)
def test_downpour_has_copies_too(algorithm):
    """The first death may come within the warm start, which the copy goes on with."""
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(SERVER, 100), (SERVER, 300)])
    check_every_update_once(run, parameters, restarts=2)


def test_adaptive_revision_has_copies_too():
    algorithm = pl.AdaptiveRevision(durability="replica", shards=2)
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(1, 100), (SERVER, 300)])
    rows = np.concatenate(list(run.records.values()))
    assert (run.result["outcome"], run.result["server_restarts"], run.result["lost_updates"]) == ("stopped", 2, 0)
    assert sorted(rows["applied_version"]) == list(range(1, parameters.version + 1))


def test_bounded_clocks_go_on():
    algorithm = pl.ParameterServer(mode=pl.Bounded(clock_bound=1), durability="replica")
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(SERVER, 150), (SERVER, 400)])
    check_every_update_once(run, parameters, restarts=2)


def test_other_launchers_start_no_copies():
    with pytest.raises(pl.UsageError, match=r"paceline\.launch, or leave durability=replica out"):
        check_algorithm(pl.spec(REPLICA), REPLICA.needs)


def test_servers_of_threads_have_copies_too():
    run = pl.launch(AddUp(SIZE, epochs=4), workers=2, algorithm=REPLICA, backend="threads")
    assert run.result["outcome"] == "stopped", run.result["outcome_reason"]
    assert run.result["version"] == 4 * NUM_BATCHES


@pytest.mark.soak
@pytest.mark.parametrize("what", SOAK)
def test_fifty_kills_of_shards(what):
    """Two deaths in each of 25 runs; writes what became of them to PACELINE_SOAK_RESULTS."""
    before, begun_s = leftovers.everything(), time.monotonic()
    results = []
    for number in range(25):
        draws = random.Random(f"shards soak {what} {number}")
        first = draws.randrange(20, 300)
        second = draws.choice([SERVER, COPY]) if "copy" in what else SERVER
        run, parameters = run_and_kill_shards(SOAK[what], kill_at=[(second, first), (SERVER, first + 300)])
        check = check_every_update_once if "replica" in what else check_reported_losses
        check(run, parameters, restarts=2)
        results.append(run.result)
    leftovers.assert_nothing_new(before)
    figures = {
        "algorithm": pl.spec(SOAK[what]),
        "runs": len(results),
        "kills": sum(one["server_restarts"] for one in results),
        "updates": sum(one["version"] for one in results),
        "lost_updates_reported": sum(one["lost_updates"] for one in results),
        "runs_whose_parameters_are_not_the_sum_of_what_is_reported": 0,
        "leftovers": 0,
        "took_s": round(time.monotonic() - begun_s, 1),
    }
    soak_results.keep("soak_shards", what, figures)
