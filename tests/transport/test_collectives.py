"""Waiting for operations whose own wait returns at once, as NCCL's does: a stand-in for what it returns."""

import threading

import pytest
from torch.distributed import HashStore

from forked import AGAINST_HANGS_S
from paceline.errors import WorkerLostError
from paceline.transport.collectives import DistributedCollectives


class Work:
    """An operation on a GPU: done after some questions, if at all."""

    def __init__(self, questions=None, error=None):
        self.left, self.error, self.waited = questions, error, False

    def is_completed(self):
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0

    def wait(self):
        self.waited = True
        if self.error is not None:
            raise RuntimeError(self.error)


def of(worker_id, store, timeout_s=AGAINST_HANGS_S):
    return DistributedCollectives(None, store, worker_id, 2, timeout_s=timeout_s)


@pytest.mark.parametrize("questions", [0, 5])
def test_an_operation_is_waited_for_until_it_is_done(questions):
    work = Work(questions)
    collectives = of(0, HashStore())
    collectives.wait_for(work, "all-reduce 1", in_slices=False)
    assert work.left == -1
    assert work.waited, "its stream's order, and its error, come from its own wait"
    assert collectives.waited_s > 0


def test_what_went_wrong_is_said():
    with pytest.raises(WorkerLostError, match=r"all-reduce 1: worker 0 arrived, worker 1 did not \(it broke\)"):
        of(0, HashStore()).wait_for(Work(3, "it broke"), "all-reduce 1", in_slices=False)


def test_a_worker_that_does_not_come_is_named_within_the_deadline():
    with pytest.raises(WorkerLostError, match=r"worker 1 did not \(not within 0\.2 s\)"):
        of(0, HashStore(), timeout_s=0.2).wait_for(Work(), "all-reduce 1", in_slices=False)


class StoreThatIsAsked:
    """A store, and what happens once somebody has asked it for a key."""

    def __init__(self, store, key, then):
        self._store, self._key, self._then = store, key, then

    def check(self, keys):
        if self._key in keys:
            self._then()
        return self._store.check(keys)

    def get(self, key):
        return self._store.get(key)


def leave_after(operations, store):
    """Worker 1's loop ends when it has taken part in so many."""
    gone = of(1, store)
    gone._num_started = operations
    gone.leave()


def test_the_last_operation_of_a_worker_that_has_left_may_still_be_under_way():
    store, work = HashStore(), Work()
    leave_after(1, store)
    asked = StoreThatIsAsked(store, "ended/1", then=lambda: setattr(work, "left", 3))
    of(0, asked).wait_for(work, "all-reduce 1", in_slices=False)
    assert work.waited


def test_an_operation_that_a_worker_left_before_is_not_waited_for():
    store = HashStore()
    leave_after(1, store)
    says = r"worker 1 did not; worker 1 had ended its loop \(another worker's loop has ended\)"
    with pytest.raises(WorkerLostError, match=says):
        of(0, store).wait_for(Work(), "all-reduce 2", in_slices=False)


def test_a_waiting_worker_learns_that_another_one_has_given_up():
    """Both are there, so neither is called missing; without this, each would wait for its own deadline."""
    store, said = HashStore(), {}

    def run(worker_id, work):
        try:
            of(worker_id, store).wait_for(work, "all-reduce 1", in_slices=False)
        except WorkerLostError as error:
            said[worker_id] = str(error)

    threads = [threading.Thread(target=run, args=one) for one in ((0, Work()), (1, Work(3, "it broke")))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AGAINST_HANGS_S)
    assert said[0].startswith(
        "all-reduce 1: all workers are there, but the operation failed: another worker has given up"
    )
    assert "it broke" in said[1]


class EndsJustAfterItsSlice:
    """An operation over Gloo whose first wait is too short, and which is done when it is asked for that."""

    waits = 0

    def is_completed(self):
        return True

    def wait(self, _):
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")


def test_an_operation_that_ends_just_after_its_slice_has_not_failed():
    work = EndsJustAfterItsSlice()
    of(0, HashStore()).wait_for(work, "all-reduce 1", in_slices=True)
    assert work.waits > 1
