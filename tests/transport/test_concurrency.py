import math
import threading

import pytest
import torch

import forked
from paceline.transport.concurrency import ThreadConcurrency


def test_programs_run_in_named_threads_without_gradients():
    seen = []
    program = ThreadConcurrency().start(
        lambda: seen.append((threading.current_thread().name, torch.is_grad_enabled(), torch.get_num_threads())),
        "averaging",
    )
    program.join()
    assert seen == [("averaging", False, torch.get_num_threads())]
    assert torch.is_grad_enabled()


def test_what_a_program_raises_is_kept_and_raised_by_join():
    concurrency = ThreadConcurrency()

    def fails():
        raise ArithmeticError("not a number")

    good = concurrency.start(lambda: None, "good")
    good.join()
    assert not good.failed()
    bad = concurrency.start(fails, "bad")
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="not a number"):
            bad.join()
    assert bad.failed()


def test_waiting_for_a_lock_is_counted_for_the_thread_that_made_it():
    concurrency = ThreadConcurrency()
    lock, held, give_back = concurrency.lock(), threading.Event(), threading.Event()
    with lock:
        pass
    assert concurrency.waited_s == 0.0

    def holds():
        with lock:
            held.set()
            give_back.wait(forked.AGAINST_HANGS_S)

    class Told:
        """The lock inside, which is given back once somebody waits for it."""

        def __init__(self, inside):
            self.inside = inside

        def acquire(self, blocking=True):
            if blocking:
                give_back.set()
            return self.inside.acquire(blocking)

        def release(self):
            self.inside.release()

    holder = concurrency.start(holds, "holder")
    assert held.wait(forked.AGAINST_HANGS_S)
    lock._lock = Told(lock._lock)
    with lock:
        assert give_back.is_set()
    holder.join()
    assert concurrency.waited_s > 0


def test_what_a_further_program_waits_is_not_the_workers_waiting():
    concurrency = ThreadConcurrency()
    lock, begun = concurrency.lock(), threading.Event()

    def waits():
        begun.set()
        with lock:
            pass

    with lock:
        waiter = concurrency.start(waits, "waiter")
        assert begun.wait(forked.AGAINST_HANGS_S)
        waiter._thread.join(0.05)  # it is in the queue for the lock, and cannot have ended
        assert waiter._thread.is_alive()
    waiter.join()
    assert concurrency.waited_s == 0.0


class Deliveries:
    """A mailbox that hands out what it was made with, and remembers how it was asked."""

    def __init__(self, *events):
        self.events, self.asked = list(events), []

    def receive(self, timeout_s=None, *, kind=None, sender=None, number=None):
        self.asked.append((timeout_s, kind))
        return self.events.pop(0)


def test_a_program_that_serves_gets_nothing_first_then_what_comes_and_ends_with_none():
    mailbox, seen, waits = Deliveries("first", None), [], [math.inf, 2.5, None]

    def handle(event):
        seen.append((event, torch.is_grad_enabled()))
        return waits[len(seen) - 1]

    ThreadConcurrency().serve(mailbox, ("a", "b"), handle, "serving").join()
    assert seen == [(None, False), ("first", False), (None, False)]
    assert mailbox.asked == [(None, ("a", "b")), (2.5, ("a", "b"))]
