"""Virtual time: order, waiting, deadlock, failure."""

import pytest
import torch

from paceline.simulator.hardware.bus import MemoryBus
from paceline.simulator.locks import LockState
from paceline.simulator.program import DeadlockError, ProgramError
from paceline.simulator.scheduler import Scheduler


def test_events_come_in_the_order_of_their_times_then_of_their_planning():
    scheduler, seen = Scheduler(), []

    def program(worker, naps):
        for nap_s in naps:
            scheduler.sleep(nap_s)
            seen.append((scheduler.now_s, worker))

    for worker, naps in enumerate([(3.0, 1.0), (1.0, 2.0), (3.0,)]):
        scheduler.start(worker, lambda worker=worker, naps=naps: program(worker, naps))
    scheduler.run()
    assert seen == [(1.0, 1), (3.0, 0), (3.0, 2), (3.0, 1), (4.0, 0)]


def test_a_deadlock_names_each_program_and_what_it_waits_for():
    scheduler = Scheduler()
    lock = LockState(scheduler, 0.0, sharing=False)

    def holds_and_ends():
        assert lock.try_acquire(write=True)

    def waits():
        scheduler.sleep(1.5)
        lock.acquire(write=True)

    scheduler.start(0, holds_and_ends)
    scheduler.start(1, waits)
    with pytest.raises(DeadlockError, match=r"at 1\.5 s .*worker 1 waits for the lock to write \(ended already: 0\)"):
        scheduler.run()


def test_an_exception_ends_all_and_carries_the_worker():
    scheduler, cleaned = Scheduler(), []

    def fails():
        scheduler.sleep(2.0)
        raise KeyError("x")

    def goes_on():
        try:
            while True:
                scheduler.sleep(1.5)
        finally:
            cleaned.append(scheduler.now_s)

    scheduler.start(0, goes_on)
    scheduler.start(7, fails)
    with pytest.raises(ProgramError, match="Worker 7 failed at 2 s of virtual time: KeyError") as caught:
        scheduler.run()
    assert caught.value.worker_id == 7
    assert isinstance(caught.value.__cause__, KeyError)
    assert cleaned == [2.0]


def test_each_program_keeps_its_gradient_mode():
    scheduler, seen = Scheduler(), []

    def program(mode):
        with torch.set_grad_enabled(mode):
            for _ in range(3):
                scheduler.sleep(1.0)
                seen.append(torch.is_grad_enabled() is mode)

    scheduler.start(0, lambda: program(True))
    scheduler.start(1, lambda: program(False))
    scheduler.run()
    assert seen == [True] * 6


def test_programs_begin_in_their_starters_gradient_mode_and_serve_without():
    scheduler, seen = Scheduler(), []

    def starts():
        with torch.no_grad():
            scheduler.sleep(1.0)  # meanwhile another one begins
        scheduler.start_serving(0, lambda: seen.append(("serves", torch.is_grad_enabled())))
        scheduler.start(0, lambda: seen.append(("begins", torch.is_grad_enabled())), is_main=False)
        scheduler.sleep(1.0)
        seen.append(("goes on", torch.is_grad_enabled()))

    scheduler.start(0, starts)
    scheduler.start(1, lambda: seen.append(("other", torch.is_grad_enabled())))
    scheduler.run()
    assert seen == [("other", True), ("serves", False), ("begins", True), ("goes on", True)]


def test_waiting_inside_backward_is_refused():
    scheduler = Scheduler()
    x = torch.ones(1, requires_grad=True)

    def program():
        y = x * 2
        y.register_hook(lambda gradient: scheduler.sleep(1.0))
        y.backward()

    scheduler.start(0, program)
    scheduler.start(1, lambda: scheduler.sleep(0.5))
    with pytest.raises(ProgramError, match="may not wait inside backward"):
        scheduler.run()


@pytest.mark.parametrize("num_transfers", [1, 2, 3, 5, 8])
def test_bus_shares_equally(num_transfers):
    scheduler = Scheduler()
    bus = MemoryBus(scheduler, core_bytes_per_s=10.0, bus_bytes_per_s=25.0)
    ends = []

    def program():
        bus.move(100.0)
        ends.append(scheduler.now_s)

    for worker in range(num_transfers):
        scheduler.start(worker, program)
    scheduler.run()
    assert ends == pytest.approx([100.0 / min(10.0, 25.0 / num_transfers)] * num_transfers)


def test_bus_with_a_late_comer():
    scheduler = Scheduler()
    bus = MemoryBus(scheduler, core_bytes_per_s=10.0, bus_bytes_per_s=10.0)
    ends = {}

    def program(worker, begin_s, num_bytes):
        scheduler.sleep(begin_s)
        bus.move(num_bytes)
        ends[worker] = scheduler.now_s

    scheduler.start(0, lambda: program(0, 0.0, 100.0))
    scheduler.start(1, lambda: program(1, 4.0, 20.0))
    scheduler.run()
    # Alone 40 bytes until 4 s; then 5 bytes/s each: the second ends at 8 s, the first has 40 left and the bus alone.
    assert ends == pytest.approx({1: 8.0, 0: 12.0})


@pytest.mark.parametrize("runs_torch", [True, False])
def test_events_of_one_instant_keep_the_order_in_which_they_were_planned(runs_torch):
    scheduler, order = Scheduler(runs_torch=runs_torch), []

    def program(name, durations_s):
        for duration_s in durations_s:
            scheduler.sleep(duration_s)
            order.append((name, scheduler.now_s))
            scheduler.call_at(scheduler.now_s, lambda: order.append((name + "'s function", scheduler.now_s)))

    scheduler.start(0, lambda: program("a", [2.0, 0.0]))
    scheduler.start(1, lambda: program("b", [1.0, 1.0]))
    scheduler.call_at(2.0, lambda: order.append(("between", scheduler.now_s)))
    scheduler.run()
    assert order == [
        ("b", 1.0),
        ("b's function", 1.0),
        ("between", 2.0),
        ("a", 2.0),
        ("b", 2.0),
        ("a's function", 2.0),
        ("a", 2.0),
    ]
