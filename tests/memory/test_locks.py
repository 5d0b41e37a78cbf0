import threading

import pytest

from forked import AGAINST_HANGS_S
from memory import programs
from paceline.memory.atomics import load, store
from paceline.memory.locks import Mutex, ReadWriteLock
from paceline.memory.ownership import owner_token, participant_of
from paceline.memory.segment import Layout, Segment
from paceline.memory.waiting import RunStopped, wait_briefly


@pytest.fixture
def areas():
    layout = Layout()
    for name, count in (("start", 1), ("lock", 5), ("words", 2), ("abort", 1)):
        layout.words(name, count)
    return Segment.create(layout.size_bytes), layout.offsets


def in_a_thread(program):
    """Runs a program that waits; returns what it ends with."""
    outcome = []

    def run():
        try:
            outcome.append(program())
        except RunStopped as stopped:
            outcome.append(stopped)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(AGAINST_HANGS_S)
        assert not thread.is_alive()
        return outcome[0]

    return result


def wait_until_nonzero(address):
    while not load(address):
        wait_briefly(address, 0)


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_a_mutex_admits_one_at_a_time(workers, areas, num_workers):
    segment, at = areas
    for worker in range(num_workers):
        workers.start(
            programs.count_under_mutex, segment, at["start"], at["lock"], at["words"], worker, num_workers, 3000
        )
    workers.join()
    assert load(segment.address + at["words"]) == num_workers * 3000
    assert load(segment.address + at["lock"]) == 0


@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_read_write_lock_keeps_readers_from_half_an_update(workers, areas, num_workers):
    segment, at = areas
    for worker in range(num_workers):
        workers.start(
            programs.count_under_write_lock, segment, at["start"], at["lock"], at["words"], worker, num_workers, 2000
        )
    workers.join()
    assert load(segment.address + at["words"]) == num_workers * 2000


def test_readers_share_and_a_writer_is_alone(areas):
    segment, at = areas
    one, two, three = (ReadWriteLock(segment, at["lock"], 3, participant) for participant in range(3))
    assert one.try_acquire_read()
    assert two.try_acquire_read()
    assert not three.try_acquire_write()
    one.release_read()
    two.release_read()
    assert three.try_acquire_write()
    assert not one.try_acquire_read()
    assert not two.try_acquire_write()
    three.release_write()
    assert one.try_acquire_read()


def test_a_waiting_writer_goes_before_new_readers(areas):
    segment, at = areas
    reader, writer, late = (ReadWriteLock(segment, at["lock"], 3, participant) for participant in range(3))
    reader.acquire_read()
    got_it = in_a_thread(writer.acquire_write)
    wait_until_nonzero(segment.address + at["lock"])
    assert not late.try_acquire_read()
    reader.release_read()
    assert got_it() is None
    assert not late.try_acquire_read()
    writer.release_write()
    assert late.try_acquire_read()


def test_a_wait_ends_when_the_run_is_stopped_and_leaves_nothing_taken(areas):
    segment, at = areas
    abort = segment.address + at["abort"]
    reader = ReadWriteLock(segment, at["lock"], 2, 0, abort_address=abort)
    writer = ReadWriteLock(segment, at["lock"], 2, 1, abort_address=abort)
    reader.acquire_read()
    stopped = in_a_thread(writer.acquire_write)
    wait_until_nonzero(segment.address + at["lock"])
    store(abort, 1)
    assert isinstance(stopped(), RunStopped)
    assert load(segment.address + at["lock"]) == 0

    reader.release_read()
    writer.acquire_write()
    with pytest.raises(RunStopped):
        reader.acquire_read()
    writer.release_write()
    assert writer.try_acquire_write()

    holder, waiter = (Mutex(segment, at["words"], participant, abort_address=abort) for participant in range(2))
    holder.acquire()
    with pytest.raises(RunStopped):
        waiter.acquire()
    holder.release()
    assert waiter.try_acquire()


def test_releasing_what_one_does_not_hold_is_an_error(areas):
    segment, at = areas
    holder, other = (Mutex(segment, at["words"], participant) for participant in range(2))
    holder.acquire()
    for mutex in (other, Mutex(segment, at["words"], 0, incarnation=1)):
        with pytest.raises(RuntimeError, match="does not hold"):
            mutex.release()
    both = ReadWriteLock(segment, at["lock"], 2, 0)
    for release in (both.release_read, both.release_write):
        with pytest.raises(RuntimeError, match="does not hold"):
            release()


def test_waiting_for_oneself_is_an_error(areas):
    segment, at = areas
    mutex = Mutex(segment, at["words"], 0)
    mutex.acquire()
    with pytest.raises(RuntimeError, match="wait for itself"):
        mutex.acquire()
    both = ReadWriteLock(segment, at["lock"], 2, 0)
    both.acquire_read()
    with pytest.raises(RuntimeError, match="wait for itself"):
        both.acquire_write()
    both.release_read()
    both.acquire_write()
    with pytest.raises(RuntimeError, match="wait for itself"):
        both.acquire_read()


def test_a_mutex_of_a_killed_owner_goes_to_a_waiting_worker(workers, areas):
    segment, at = areas
    workers.run_killed(programs.take_mutex, segment, at["lock"], fail_point="lock.taken#1")
    waiter = Mutex(segment, at["lock"], 1)
    assert not waiter.try_acquire()
    got_it = in_a_thread(waiter.acquire)
    assert not waiter.recover(owner_token(0, incarnation=1))  # another life of the same worker holds nothing
    assert waiter.recover(owner_token(0, incarnation=0))
    assert got_it() is None
    waiter.release()


@pytest.mark.parametrize(("side", "held_writing"), [("read", False), ("write", True)])
def test_a_read_write_lock_of_a_killed_owner_goes_to_a_writer(workers, areas, side, held_writing):
    segment, at = areas
    workers.run_killed(programs.take_read_write_lock, segment, at["lock"], 2, side, fail_point="lock.taken#1")
    waiter = ReadWriteLock(segment, at["lock"], 2, 1)
    assert not waiter.try_acquire_write()
    got_it = in_a_thread(waiter.acquire_write)
    assert waiter.recover(owner_token(0, incarnation=0)) is held_writing
    assert got_it() is None
    waiter.release_write()


def test_a_token_names_its_participant_and_life():
    assert participant_of(owner_token(5, incarnation=9)) == 5
    assert len({owner_token(p, i) for p in range(3) for i in range(3)}) == 9
    with pytest.raises(ValueError, match="participant_id"):
        owner_token(-1, 0)
    with pytest.raises(ValueError, match="incarnation"):
        owner_token(0, -1)
