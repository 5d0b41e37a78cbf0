"""Whose gradients count, and when: bounds that are reached and never exceeded, quorums that nobody can starve."""

import heapq
import random

import pytest

import paceline as pl
from paceline.algorithms.server.admission import AutoSync, Bounded, Follower, Sync, Verdict
from paceline.algorithms.server.update import UpdateInfo


def update(worker, sequence, step=0, version=0):
    return UpdateInfo(worker_id=worker, sequence=sequence, step=step, version_read=step, version=version, num_samples=1)


@pytest.mark.parametrize(("bound", "workers"), [(0, 3), (1, 5), (4, 8)])
def test_the_clock_bound_is_reached_and_never_exceeded_in_100_000_updates(bound, workers):
    """Random delays, one worker ten times as slow; also the bound in versions that the docstring states."""
    draw, admission = random.Random(bound), Bounded(bound, range(workers))
    begun, version, read_at, waiting = [0] * workers, 0, [0] * workers, set()
    events = [(draw.random(), worker) for worker in range(workers)]
    heapq.heapify(events)
    furthest = stalest = 0
    while version < 100_000:
        now, worker = heapq.heappop(events)
        stalest = max(stalest, version - read_at[worker])
        begun[worker] += 1
        one = update(worker, begun[worker], version=version)
        assert admission.admit(one) is Verdict.APPLY
        version += 1
        admission.applied(one)
        waiting.add(worker)
        for ready in [each for each in waiting if admission.may_read(each)]:
            waiting.discard(ready)
            ahead = begun[ready] - min(begun)
            assert ahead <= bound
            furthest, read_at[ready] = max(furthest, ahead), version
            heapq.heappush(events, (now + draw.expovariate(0.1 if ready == 0 else 1.0), ready))
    assert furthest == bound
    assert bound < stalest <= (2 * bound + 1) * (workers - 1) or workers == 1 or bound == 0


def test_one_that_leaves_is_not_waited_for_and_one_that_joins_late_begins_at_the_slowest_clock():
    admission = Bounded(1, range(3))
    for sequence in (1, 2):
        admission.applied(update(0, sequence))
        admission.applied(update(1, sequence))
    assert not admission.may_read(0)
    admission.leave(2)
    assert admission.may_read(0)
    admission.join(2)
    assert admission.clocks == {0: 2, 1: 2, 2: 2}
    admission.applied(update(2, 1))
    assert admission.clocks[2] == 3


def test_sync_takes_the_first_of_a_step_and_no_other_step():
    admission = Sync(2, range(3))
    assert admission.admit(update(2, 1)) is Verdict.HOLD
    assert admission.complete() == ()
    assert admission.admit(update(0, 1, step=-1)) is Verdict.DROP
    assert admission.admit(update(0, 2, step=1)) is Verdict.DROP
    assert admission.admit(update(1, 1)) is Verdict.HOLD
    assert admission.complete() == (1, 2)
    admission.applied(update(1, 1))
    assert admission.admit(update(0, 3, step=0, version=1)) is Verdict.DROP


def test_a_worker_that_was_late_twice_loses_no_fresh_gradient():
    """SystemDS counts missed rounds, and then drops as many gradients, whatever step they are of."""
    admission = Sync(1, range(2))
    for step in range(2):
        admission.admit(update(0, step + 1, step=step, version=step))
        assert admission.complete() == (0,)
        admission.applied(update(0, step + 1, step=step, version=step))
    assert admission.admit(update(1, 1, step=0, version=2)) is Verdict.DROP
    assert admission.admit(update(1, 2, step=2, version=2)) is Verdict.HOLD
    assert admission.complete() == (1,)


def test_a_quorum_never_waits_for_those_who_have_left():
    """TensorFlow hands out tokens that late gradients eat up, and hangs once 27 of 64 workers have no more data."""
    admission = Sync(60, range(64))
    for worker in range(27):
        admission.leave(worker)
    for worker in range(27, 64):
        admission.admit(update(worker, 1))
    assert admission.complete() == tuple(range(27, 64))
    for worker in range(27, 63):
        admission.leave(worker)
    assert len(admission.complete()) == 37, "what they brought still counts"


def test_a_dead_workers_gradient_counts_and_nobody_elses_is_dropped_for_it():
    admission = Sync(3, range(3))
    admission.admit(update(0, 1))
    admission.leave(0)
    admission.admit(update(1, 1))
    assert admission.complete() == ()
    admission.admit(update(2, 1))
    assert admission.complete() == (0, 1, 2)


def test_a_follower_takes_whom_the_first_shard_chose():
    follower = Follower(2, range(3))
    for worker in range(3):
        follower.admit(update(worker, 1))
    assert follower.complete() == ()
    follower.choose(0, (0, 2))
    assert follower.complete() == (0, 2)
    follower.applied(update(0, 1))
    follower.admit(update(1, 2, step=1, version=1))
    follower.choose(0, (0, 1))
    follower.choose(1, (0, 1))
    assert follower.complete() == (), "worker 0 was chosen and may still come"
    follower.leave(0)
    assert follower.complete() == (1,)
    assert follower.num_incomplete == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("parameter-server(mode=bounded)", "needs a clock_bound"),
        ("parameter-server(durability=replica, snapshot_s=1)", "snapshot_s is for durability=snapshot"),
        ("parameter-server(clock_bound=2)", "leave it out"),
        ("parameter-server(mode=async, backups=1)", "leave it out"),
        ("parameter-server(backups=-1)", "0 or more"),
        ("parameter-server(shards=0)", "1 shard or more"),
        ("parameter-server(mode=bounded, clock_bound=-1)", "0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(spec, words):
    with pytest.raises(pl.UsageError, match=words):
        pl.parse(spec)


def test_as_many_backups_as_workers_are_refused():
    with pytest.raises(pl.UsageError, match="at most 2 can be backups"):
        pl.parse("parameter-server(backups=3)").check(3)


def drive_auto(num_workers, slow, steps, dies_at=None):
    """Rounds of AutoSync in which worker 0 takes `slow(step)` as long as the others; b and the updates' sizes of each step."""
    admission = AutoSync(range(num_workers), every_steps=10)
    used, sizes = [], []
    for step in range(steps):
        if step == dies_at:
            admission.leave(0)
        order = [*range(1, num_workers)] + ([0] if dies_at is None or step < dies_at else [])
        made = ()
        for worker in order:
            admission.timed(worker, slow(step) if worker == 0 else 1.0)
            if not made:
                admission.admit(update(worker, step, step=step, version=step))
                made = admission.complete()
        used.append(admission.backups)
        sizes.append(len(made))
        admission.applied(update(made[0], step, step=step, version=step))
    return used, sizes, admission


def test_backups_are_chosen_again_from_the_times_that_came():
    used, sizes, admission = drive_auto(4, lambda step: 5.0 if step < 300 else 1.0, 600)
    assert (used[:10], sizes[:10]) == ([0] * 10, [4] * 10)
    assert (used[10:300], sizes[10:300]) == ([1] * 290, [3] * 290)
    assert used[-1] == 0, "it has recovered"
    assert sizes[-1] == 4
    assert admission.steps_with == {b: used.count(b) for b in (0, 1)}
    even, *_ = drive_auto(4, lambda step: 1.0, 50)
    assert set(even) == {0}


def test_a_dead_workers_backup_is_no_longer_needed():
    used, sizes, _ = drive_auto(4, lambda step: 5.0, 60, dies_at=35)
    assert set(used[10:35]) == {1}
    assert set(sizes[10:35]) == {3}
    assert set(sizes[35:40]) == {2}, "three are left, and one of them is a backup until the next choice"
    assert set(sizes[41:]) == {3}
