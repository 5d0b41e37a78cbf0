import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memory import programs
from paceline.memory.atomics import load, store
from paceline.memory.segment import Layout, Segment
from paceline.memory.slots import SlotPool
from paceline.memory.waiting import RunStopped


def pool_of(num_participants, num_parameters, num_evaluators=0):
    layout = Layout()
    start = layout.words("start", 1)
    plan = SlotPool.reserve(layout, num_parameters, num_participants, num_evaluators=num_evaluators)
    segment = Segment.create(layout.size_bytes)
    SlotPool(segment, plan, 0).initialise(torch.zeros(num_parameters))
    return segment, start, plan


@pytest.mark.parametrize(("num_workers", "num_evaluators"), [(1, 0), (2, 0), (3, 1), (5, 0)])
def test_every_update_counts_once_and_no_version_is_torn(workers, num_workers, num_evaluators):
    times = 6000 // num_workers
    num_present = num_workers + num_evaluators
    segment, start, plan = pool_of(num_present, num_present + 1000, num_evaluators)
    for worker in range(num_workers):
        workers.start(programs.update_slots, segment, start, plan, worker, num_present, times)
    for evaluator in range(num_workers, num_present):
        total = times * num_workers
        workers.start(programs.watch_slots, segment, start, plan, evaluator, num_present, total)
    workers.join()
    pool = SlotPool(segment, plan, 0)
    assert pool.version == times * num_workers
    newest = pool.latest().x
    assert newest[:num_workers].tolist() == [times] * num_workers
    assert (newest[num_present:] == times * num_workers).all()
    # The memory that the paper promises: with one gradient each, m workers need 3m vectors.
    assert pool.touched_slots() <= 2 * num_workers + num_evaluators
    assert not any(load(segment.address + plan.at["owners"] + slot * 64) for slot in range(plan.num_slots))


def test_updates_that_give_up_leave_no_trace(workers):
    segment, start, plan = pool_of(3, 2000)
    for worker in range(3):
        workers.start(programs.update_slots, segment, start, plan, worker, 3, 300, 1)
    workers.join()
    pool = SlotPool(segment, plan, 0)
    newest = pool.latest().x
    assert newest[:3].sum() == pool.version <= 900
    assert (newest[3:] == pool.version).all()


def test_only_the_first_of_two_publications_after_one_version_succeeds():
    segment, _, plan = pool_of(2, 3)
    one, two = (SlotPool(segment, plan, worker) for worker in range(2))
    after_one, after_two = one.latest(), two.latest()
    new_one, new_two = one.claim(), two.claim()
    one.leave()
    two.leave()
    assert two.publish(new_two, after_two)
    assert not one.publish(new_one, after_one)
    one.discard(new_one)
    assert (one.version, one.latest().slot) == (1, new_two.slot)


def test_a_slot_that_came_back_as_the_head_is_not_taken_for_what_it_was():
    segment, _, plan = pool_of(2, 3)
    slow, fast = (SlotPool(segment, plan, worker) for worker in range(2))
    after = slow.latest()
    slow.leave()
    mine = slow.claim()
    for _ in range(2):
        newest = fast.latest()
        new = fast.claim()
        fast.leave()
        assert fast.publish(new, newest)
    assert fast.latest().slot == after.slot  # the same slot, two versions later
    assert not slow.publish(mine, after)


def test_a_slot_of_another_worker_can_neither_be_published_nor_given_back():
    segment, _, plan = pool_of(2, 3)
    one, two = (SlotPool(segment, plan, worker) for worker in range(2))
    after, new = one.latest(), one.claim()
    for misuse in (lambda: two.publish(new, after), lambda: two.discard(new)):
        with pytest.raises(RuntimeError, match="not this worker's"):
            misuse()
    with pytest.raises(RuntimeError, match="leave"):
        one.snapshot(torch.empty(3))
    assert one.publish(new, after)
    with pytest.raises(RuntimeError, match="not this worker's"):
        one.publish(new, after)


def test_a_claim_that_waits_for_a_slot_ends_when_the_run_is_stopped():
    segment, start, plan = pool_of(1, 3)
    pool = SlotPool(segment, plan, 0, abort_address=segment.address + start)
    store(segment.address + start, 1)
    pool.claim(), pool.claim()
    with pytest.raises(RunStopped):
        pool.claim()


WORKERS, EVALUATORS = 3, 1
worker_ids = st.integers(0, WORKERS - 1)
participant_ids = st.integers(0, WORKERS + EVALUATORS - 1)


class AnyOrderOfCalls(RuleBasedStateMachine):
    """Calls of all participants in any order: what one reads or writes is never anybody else's to write."""

    @initialize()
    def begin(self):
        self.segment, _, self.plan = pool_of(WORKERS + EVALUATORS, 2, EVALUATORS)
        self.incarnations = [0] * (WORKERS + EVALUATORS)
        self.pools = [SlotPool(self.segment, self.plan, who) for who in range(WORKERS + EVALUATORS)]
        self.held = {}  # what each one reads, protected
        self.seen = {}  # what it read last
        self.claimed = {}
        self.versions = 0

    @rule(who=participant_ids)
    def read(self, who):
        view = self.held[who] = self.seen[who] = self.pools[who].latest()
        assert view.version == self.versions

    @rule(who=participant_ids)
    def leave(self, who):
        self.pools[who].leave()
        self.held.pop(who, None)

    @precondition(lambda self: len(self.claimed) < WORKERS)
    @rule(who=worker_ids)
    def claim(self, who):
        if who not in self.claimed:
            self.claimed[who] = self.pools[who].claim()
            self.claimed[who].x.fill_(-1 - who)

    @precondition(lambda self: self.claimed)
    @rule(who=worker_ids)
    def publish(self, who):
        if who not in self.claimed or who not in self.seen:
            return
        self.leave(who)
        self.claimed[who].x.fill_(self.seen[who].version + 1)
        published = self.pools[who].publish(self.claimed[who], self.seen[who])
        assert published == (self.seen[who].version == self.versions)
        if published:
            self.versions += 1
        else:
            self.pools[who].discard(self.claimed[who])
        del self.claimed[who]

    @rule(who=participant_ids, by=participant_ids)
    def die_and_come_back(self, who, by):
        self.pools[by].recover(who, self.incarnations[who])
        self.incarnations[who] += 1
        self.pools[who] = SlotPool(self.segment, self.plan, who, self.incarnations[who])
        for left in (self.held, self.seen, self.claimed):
            left.pop(who, None)

    @invariant()
    def nothing_is_shared_that_is_written(self):
        if not hasattr(self, "pools"):
            return
        assert all((view.x == view.version).all() for view in self.held.values())
        written = [view.slot for view in self.claimed.values()]
        assert len(set(written)) == len(written)
        assert not set(written) & {view.slot for view in self.held.values()}
        assert self.pools[0].version == self.versions
        assert self.pools[0].touched_slots() <= 2 * WORKERS + EVALUATORS


AnyOrderOfCalls.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
