import time

import pytest

from memory import programs
from paceline.memory import waiting
from paceline.memory.atomics import load, store
from paceline.memory.segment import Segment
from paceline.system.clock import RealClock


@pytest.mark.parametrize("has_futex", [True, False])
def test_a_change_by_another_process_ends_the_wait(workers, monkeypatch, has_futex):
    monkeypatch.setattr(waiting, "_HAS_FUTEX", has_futex)
    segment = Segment.create(64)
    workers.start(programs.change_and_wake, segment, 0, 5)
    while not (seen := waiting.wait_briefly(segment.address, 0)):
        pass
    assert seen == 5
    workers.join()


def test_a_wait_without_a_change_is_bounded():
    segment = Segment.create(64)
    began_s = time.perf_counter()
    assert waiting.wait_briefly(segment.address, 0) == 0
    assert time.perf_counter() - began_s < 600 * waiting.SLICE_S


def test_an_abort_word_stops_a_wait_that_looks_at_it():
    segment = Segment.create(64)
    waiting.raise_if_stopped(0)
    waiting.raise_if_stopped(segment.address)
    store(segment.address, 1)
    with pytest.raises(waiting.RunStopped):
        waiting.raise_if_stopped(segment.address)
    assert load(segment.address) == 1


@pytest.mark.parametrize("duration_s", [0.0, 20e-6, 300e-6])
def test_a_precise_sleep_is_never_too_short(duration_s):
    began_s = time.perf_counter()
    waiting.sleep_precisely(duration_s)
    assert time.perf_counter() - began_s >= duration_s


@pytest.mark.timeout(60)
def test_no_waiter_sleeps_through_the_end_of_a_run():
    segment = Segment.create(64)
    store(segment.address, 1)
    with pytest.raises(waiting.RunStopped):
        waiting.sleep_precisely(1e6, segment.address)
    clock = RealClock()
    clock.stopped = lambda: load(segment.address) == 1
    with pytest.raises(waiting.RunStopped):
        clock.sleep_s(1e6)
    assert clock.waited_s < 1e6
