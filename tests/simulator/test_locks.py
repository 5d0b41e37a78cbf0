"""Simulated locks: they exclude, lose no wake-up, and are taken by the first to come when they are free, as the real ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.simulator import Cluster, Faults, Normal
from paceline.simulator.concurrency import SimulatedConcurrency
from paceline.simulator.locks import LockState
from paceline.simulator.scheduler import Scheduler

WAKE_S = 0.25


def taken_s(visits, *, sharing=False, spin_s=0.0, kills=()):
    """When each visitor has got the lock: (comes at, holds for, whether to write) of each; None: never."""
    scheduler, got_s = Scheduler(runs_torch=False), {}
    lock = LockState(scheduler, WAKE_S, sharing=sharing, spin_s=spin_s)
    inside = {True: 0, False: 0}

    def visit(number, at_s, for_s, write):
        scheduler.sleep(at_s)
        if not lock.try_acquire(write=write):
            lock.acquire(write=write)
        inside[write or not sharing] += 1
        assert inside[True] <= 1
        assert not (inside[True] and inside[False])
        got_s[number] = scheduler.now_s
        try:
            scheduler.sleep(for_s)
        finally:
            inside[write or not sharing] -= 1
            lock.release(write=write)

    for number, (at_s, for_s, write) in enumerate(visits):
        scheduler.start(number, lambda number=number, visit_=(at_s, for_s, write): visit(number, *visit_))
    for number, at_s in kills:
        scheduler.call_at(at_s, lambda number=number: scheduler.end_worker(number))
    scheduler.run()
    return [got_s.get(number) for number in range(len(visits))]


@pytest.mark.parametrize(
    ("visits", "spin_s", "expected_s"),
    [
        ([(0, 1, True), (0.5, 1, True)], 0.0, [0, 1.25]),  # asleep: woken at 1, and runs 0.25 s later
        ([(0, 1, True), (0.5, 1, True)], 0.6, [0, 1]),  # still spinning
        ([(0, 1, True), (0.5, 1, True), (1.1, 1, True)], 0.0, [0, 2.35, 1.1]),  # one that comes in between takes it
        ([(0, 1, True), (0.5, 1, True), (1.1, 0.1, True)], 0.0, [0, 1.25, 1.1]),  # and has left before the other runs
        ([(0, 1, True), (0.2, 1, True), (0.5, 1, True)], 0.0, [0, 1.25, 2.5]),  # sleepers are woken in order
        # Woken for nothing, the second visitor goes behind the third.
        ([(0, 1, True), (0.2, 1, True), (0.5, 1, True), (1.1, 1, True)], 0.0, [0, 3.6, 2.35, 1.1]),
        # The third still spins when the lock is free, the second sleeps: woken as well, it finds it taken and falls asleep.
        ([(0, 1, True), (0.2, 1, True), (0.5, 1, True)], 0.6, [0, 2.25, 1]),
        # It was taken by a newcomer and given back before the one that was woken ran: nobody but that one is woken.
        ([(0, 1, True), (0.2, 1, True), (0.5, 1, True), (1.1, 0.1, True)], 0.0, [0, 1.25, 2.5, 1.1]),
    ],
)
def test_a_mutex_is_not_handed_over(visits, spin_s, expected_s):
    assert taken_s(visits, spin_s=spin_s) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("visits", "spin_s", "expected_s"),
    [
        ([(0, 1, False), (0.5, 1, False)], 0.0, [0, 0.5]),  # readers share
        ([(0, 1, False), (0.5, 1, True), (0.6, 1, False)], 0.0, [0, 1.25, 2.5]),  # a writer keeps new readers out
        ([(0, 1, False), (0.5, 1, True), (0.6, 1, False)], 9.0, [0, 1, 2]),
        ([(0, 1, False), (0.2, 2, False), (0.5, 1, True)], 0.0, [0, 0.2, 2.45]),  # it waits for all that are inside
        # All that sleep are woken at once, and try in their order: a reader, a writer that waits for it, a reader too late.
        ([(0, 1, True), (0.2, 1, False), (0.4, 1, True), (0.6, 1, False)], 0.0, [0, 1.25, 2.5, 3.75]),
        ([(0, 1, True), (0.2, 1, True), (0.4, 1, False), (0.6, 1, False)], 0.0, [0, 1.25, 2.5, 2.5]),
        ([(0, 1, True), (0.2, 1, False), (0.4, 1, False), (1.1, 1, False)], 0.0, [0, 1.25, 1.25, 1.1]),
    ],
)
def test_a_read_write_lock_wakes_all_that_sleep(visits, spin_s, expected_s):
    assert taken_s(visits, sharing=True, spin_s=spin_s) == pytest.approx(expected_s)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize(
    ("kills", "expected_s"),
    [
        ([(1, 0.7)], [0, None, 1.25]),  # while it slept
        ([(1, 1.1)], [0, None, 1.35]),  # while it was woken: the next is, instead
        ([(0, 0.8)], [0, 1.05, 2.3]),  # while it held the lock
    ],
)
def test_a_killed_worker_leaves_the_lock_to_the_others(sharing, kills, expected_s):
    visits = [(0, 1, True), (0.2, 1, True), (0.5, 1, True)]
    if sharing and kills == [(1, 1.1)]:
        expected_s = [0, None, 1.25]  # all had been woken
    assert taken_s(visits, sharing=sharing, kills=kills) == pytest.approx(expected_s, nan_ok=True)


def test_a_writer_that_is_killed_while_it_waits_for_readers_lets_others_in():
    visits = [(0, 2, False), (0.5, 1, True), (0.7, 1, False)]
    assert taken_s(visits, sharing=True, kills=[(1, 1.0)]) == pytest.approx([0, None, 1.25])


TIMES = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0])


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    visits=st.lists(st.tuples(TIMES, TIMES, st.booleans()), min_size=1, max_size=7),
    sharing=st.booleans(),
    spin_s=st.sampled_from([0.0, 0.25, 1.0, 100.0]),
    killed=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.125, 0.3, 0.75, 1.25, 2.0])), max_size=2),
)
def test_every_worker_that_is_not_killed_gets_in(visits, sharing, spin_s, killed):
    """Exclusion is asserted inside; a wake-up that is lost is a deadlock, which raises."""
    kills = [(number, at_s) for number, at_s in killed if number < len(visits)]
    got_s = taken_s(visits, sharing=sharing, spin_s=spin_s, kills=kills)
    missing = {number for number, at_s in enumerate(got_s) if at_s is None}
    assert missing <= {number for number, _ in kills}


def test_a_lock_between_two_programs_of_a_worker_is_free_when_it_is_left():
    """Until the one that was woken runs, another may come, as at a thread's lock."""
    scheduler, order = Scheduler(), []
    lock = SimulatedConcurrency(scheduler, 0, wake_s=WAKE_S).lock()

    def program(name, at_s):
        scheduler.sleep(at_s)
        with lock:
            order.append((name, scheduler.now_s))
            scheduler.sleep(1.0)

    for name, at_s in (("holds", 0.0), ("sleeps", 0.5), ("comes", 1.125)):
        scheduler.start(0, lambda name=name, at_s=at_s: program(name, at_s))
    scheduler.run()
    assert order == [("holds", 0.0), ("comes", 1.125), ("sleeps", 2.375)]


@pytest.mark.parametrize("kind", ["mutex", "rwlock"])
@pytest.mark.parametrize("spin_s", [0.0, 1e-4])
def test_workers_that_crowd_a_lock_are_repeatable_and_lose_nothing(kind, spin_s):
    cluster = Cluster(
        workers=7, compute_s=Normal(average_s=1e-4, deviation_s=3e-5), wake_s=2e-5, spin_s=spin_s, cores=7, slice_s=1.0
    )
    config = pl.TrainConfig(algorithm=f"locked(kind={kind})", steps=60)
    faults = Faults().kill(worker=3, at_s=0.002)
    runs = [
        pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=50_000, faults=faults)
        for _ in range(2)
    ]
    assert runs[0].result == runs[1].result
    assert [len(rows) for worker, rows in runs[0].records.items() if worker != 3] == [60] * 6
    assert runs[0].result["version"] == sum(len(rows) for rows in runs[0].records.values())
