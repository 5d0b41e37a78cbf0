"""`durability=replica` in real processes: whichever process of a shard dies, every update is made exactly once."""

import random

import numpy as np
import pytest

import paceline as pl
from contracts.programs import AddUp
from paceline.memory.failpoints import ENVIRONMENT_VARIABLE
from processes.shards import EPOCHS, SIZE, batch_sums, check_every_update_once, run_and_kill_shards

REPLICA = pl.ParameterServer(mode="async", durability="replica")
SERVER, COPY = 0, 1


@pytest.mark.parametrize("round_number", range(3))
def test_a_shard_is_killed_and_no_update_is_lost_or_made_twice(round_number):
    """Its copy takes over; once that has a copy of its own, it is killed as well."""
    at = random.Random(f"replica {round_number}").randrange(20, 300)
    run, parameters = run_and_kill_shards(REPLICA, kill_at=[(SERVER, at), (SERVER, at + 300)])
    check_every_update_once(run, parameters, restarts=2)
    assert sum("took over" in note for note in run.result["notes"]) == 2


def test_the_copy_is_killed_and_then_the_server():
    run, parameters = run_and_kill_shards(REPLICA, kill_at=[(COPY, 200), (SERVER, 400), (COPY, 600), (COPY, 601)])
    check_every_update_once(run, parameters, restarts=4)


@pytest.mark.parametrize(("point", "restarts"), [("served.mid_write@3#333", 1), ("copy.mid_write@4#333", 1)])
def test_killed_in_the_middle_of_an_update(point, restarts, monkeypatch):
    """One of the two has the update already, the other not yet, and no worker was answered."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, point)
    run, parameters = run_and_kill_shards(REPLICA, kill_at=[])
    check_every_update_once(run, parameters, restarts=restarts)


def test_both_are_killed_at_once_and_the_run_says_so():
    with pytest.raises(
        pl.PacelineError, match=r"Shard 0 of the server was ended by signal 9 while its second copy .* --resume"
    ):
        run_and_kill_shards(REPLICA, kill_at=[(COPY, 200), (SERVER, 200)], together=True)


def test_shards_that_choose_together_stay_together():
    """Two of three gradients make a step, in both shards the same two, whichever shard dies; what is dropped is in neither."""
    algorithm = pl.ParameterServer(backups=1, shards=2, durability="replica")
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(1, 100), (0, 200), (1, 300), (0, 400)])
    result = run.result
    assert (result["outcome"], result["server_restarts"]) == ("stopped", 4), result["outcome_reason"]
    rows = np.concatenate(list(run.records.values()))
    rows = rows[rows["applied_version"] > 0]
    versions, sizes = np.unique(rows["applied_version"], return_counts=True)
    assert versions.tolist() == list(range(1, parameters.version + 1))
    totals = np.bincount(rows["applied_version"], batch_sums(rows))[1:]
    assert parameters.x[:SIZE].unique().tolist() == [(totals / sizes).sum()]
    assert [shard["version"] for shard in result["shards"]] == [parameters.version] * 2
    assert parameters.version > EPOCHS * 10


def test_bounded_clocks_go_on():
    algorithm = pl.ParameterServer(mode="bounded", clock_bound=1, durability="replica")
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(SERVER, 150), (SERVER, 400)])
    check_every_update_once(run, parameters, restarts=2)


def test_servers_of_threads_have_copies_too():
    run = pl.launch(AddUp(SIZE, epochs=4), workers=2, algorithm=REPLICA, backend="threads")
    assert run.result["outcome"] == "stopped", run.result["outcome_reason"]
    assert run.result["version"] == 4 * 48
