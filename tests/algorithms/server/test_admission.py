"""Whose gradients count, and when: bounds that are reached and never exceeded, quorums that nobody can starve."""

import heapq
import random

import pytest

import paceline as pl
from paceline.algorithms.server.admission import AutoQuorum, Clocks, Follower, Quorum, Verdict
from paceline.algorithms.server.update import UpdateInfo


def update(worker, sequence, step=0, version=0):
    return UpdateInfo(worker_id=worker, sequence=sequence, step=step, version_read=step, version=version, num_samples=1)


@pytest.mark.parametrize(("bound", "workers"), [(0, 3), (1, 5), (4, 8)])
def test_the_clock_bound_is_reached_and_never_exceeded_in_100_000_updates(bound, workers):
    """Random delays, one worker ten times as slow; also the bound in versions that the docstring states."""
    draw, admission = random.Random(bound), Clocks(bound, range(workers))
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
    admission = Clocks(1, range(3))
    for sequence in (1, 2):
        admission.applied(update(0, sequence))
        admission.applied(update(1, sequence))
    assert not admission.may_read(0)
    admission.leave(2)
    assert admission.may_read(0)
    admission.join(2)
    assert admission.clocks == {0: 2, 1: 2, 2: 2}
    assert admission.clock(2) == 2, "from which its updates are to be counted"
    admission.applied(update(2, 3))
    assert admission.clocks[2] == 3


def test_clocks_never_go_back():
    admission = Clocks(0, range(2))
    admission.told(0, 7)
    admission.applied(update(0, 5))
    admission.join(1, 3)
    assert admission.clocks == {0: 7, 1: 7}
    admission.leave(0)
    admission.leave(1)
    admission.join(1)
    assert admission.clocks == {1: 7}, "also where nobody is left whose clock is the slowest"
    admission.told(0, 9)
    assert admission.clocks == {1: 7}, "nobody waits for a worker that does not take part"


def test_a_joiner_that_says_it_is_ahead_is_believed():
    """It was taken for dead, and has sent updates meanwhile that other shards have."""
    admission = Clocks(0, range(2))
    admission.leave(0)
    admission.join(0, 4)
    assert admission.clocks == {0: 4, 1: 0}
    assert not admission.may_read(0)


def test_sync_takes_the_first_of_a_step_and_no_other_step():
    admission = Quorum(2, range(3))
    assert admission.admit(update(2, 1)) is Verdict.HOLD
    assert admission.complete() is None
    assert admission.admit(update(0, 1, step=-1)) is Verdict.DROP
    assert admission.admit(update(0, 2, step=1)) is Verdict.DROP
    assert admission.admit(update(1, 1)) is Verdict.HOLD
    assert admission.complete() == (1, 2)
    admission.over(1)
    assert admission.admit(update(0, 3, step=0, version=1)) is Verdict.DROP


def test_a_worker_that_was_late_twice_loses_no_fresh_gradient():
    """SystemDS counts missed rounds, and then drops as many gradients, whatever step they are of."""
    admission = Quorum(1, range(2))
    for step in range(2):
        admission.admit(update(0, step + 1, step=step, version=step))
        assert admission.complete() == (0,)
        admission.over(step + 1)
    assert admission.admit(update(1, 1, step=0, version=2)) is Verdict.DROP
    assert admission.admit(update(1, 2, step=2, version=2)) is Verdict.HOLD
    assert admission.complete() == (1,)


def test_a_quorum_never_waits_for_workers_that_have_left():
    """TensorFlow hands out tokens that late gradients eat up, and hangs once 27 of 64 workers have no more data."""
    admission = Quorum(60, range(64))
    for worker in range(27):
        admission.leave(worker)
    for worker in range(27, 64):
        admission.admit(update(worker, 1))
    assert admission.complete() == tuple(range(27, 64))
    for worker in range(27, 63):
        admission.leave(worker)
    assert len(admission.complete()) == 37, "what they brought still counts"


def test_a_dead_workers_gradient_counts_and_nobody_elses_is_dropped_for_it():
    admission = Quorum(3, range(3))
    admission.admit(update(0, 1))
    admission.leave(0)
    admission.admit(update(1, 1))
    assert admission.complete() is None
    admission.admit(update(2, 1))
    assert admission.complete() == (0, 1, 2)


def test_a_follower_takes_whom_the_first_shard_chose():
    follower = Follower(2, range(3))
    for worker in range(3):
        follower.admit(update(worker, 1))
    assert follower.complete() is None
    follower.choose(0, (0, 2))
    assert follower.complete() == (0, 2)
    follower.over(1)
    follower.admit(update(1, 2, step=1, version=1))
    follower.choose(0, (0, 1))
    follower.choose(1, (0, 1))
    assert follower.complete() is None, "worker 0 was chosen and may still come"
    follower.leave(0)
    assert follower.complete() == (1,)
    assert follower.incomplete == 1


def test_a_follower_does_not_wait_for_what_died_with_a_process():
    """Worker 0 died before its gradient came here; the process in its place begins with the next step."""
    follower = Follower(2, range(2))
    follower.admit(update(1, 1))
    follower.leave(0)
    follower.join(0)
    follower.choose(0, (0, 1))
    assert follower.complete() is None, "it may yet bring one for this step"
    follower.past(0)
    assert follower.complete() == (1,)


@pytest.mark.parametrize("arrived", [(), (1,), (1, 2)])
def test_a_step_whose_choice_is_lost_ends_with_what_is_here(arrived):
    follower = Follower(3, range(3))
    for worker in arrived:
        follower.admit(update(worker, 1))
    follower.choose(0, ())
    assert follower.complete() == arrived
    follower.choose(0, (1, 2))
    follower.choose(0, ())
    assert (follower.complete() == (1, 2)) == (arrived == (1, 2)), "what is known counts"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("parameter-server(mode=bounded)", r"needs clock_bound: write bounded\(clock_bound"),
        ("parameter-server(mode=asynch)", "Unknown mode 'asynch'. Did you mean 'async'"),
        ("parameter-server(durability=replica, snapshot_s=1)", "snapshot_s is for durability=snapshot"),
        ("parameter-server(mode=async(backups=1))", "'async' has no argument 'backups'"),
        ("parameter-server(mode=sync(backups=-1))", "0 or more"),
        ("parameter-server(mode=sync(backups=auto, quorum=per-shard), shards=2)", "leave out quorum=per-shard"),
        ("parameter-server(shards=0)", "shards .* must be 1 or more"),
        ("parameter-server(mode=bounded(clock_bound=-1))", "0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(spec, words):
    with pytest.raises(pl.UsageError, match=words):
        pl.parse(spec)


@pytest.mark.parametrize(
    "mode",
    [
        pl.Sync(),
        pl.Sync(backups="auto"),
        pl.Sync(backups=3, quorum="per-shard", rate="linear"),
        pl.Async(),
        pl.Bounded(clock_bound=0),
        pl.Async(rate="rescaled"),
        pl.Rennala(),
        pl.Rennala(gradients=3),
        pl.Ringmaster(threshold=7),
        pl.Ringleader(),
    ],
)
def test_every_mode_is_its_spec(mode):
    algorithm = pl.ParameterServer(mode=mode)
    assert pl.parse(pl.spec(algorithm)) == algorithm
    assert (pl.spec(algorithm) == "parameter-server") == (mode == pl.Sync())


def test_as_many_backups_as_workers_are_refused():
    with pytest.raises(pl.UsageError, match="at most 2 can be backups"):
        pl.parse("parameter-server(mode=sync(backups=3))").check(3)


def drive_auto(num_workers, slow, steps, dies_at=None):
    """Rounds of AutoQuorum in which worker 0 takes `slow(step)` as long as the others; b and updates' sizes of each step."""
    admission = AutoQuorum(range(num_workers), every_steps=10)
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
        admission.over(step + 1)
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
