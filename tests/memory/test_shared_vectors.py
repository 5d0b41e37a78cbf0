"""What the three kinds of shared parameters have in common, and what happens to each when a worker is killed."""

import os

import pytest
import torch

from memory import programs
from paceline.memory.atomics import store
from paceline.memory.locked import LockedVector
from paceline.memory.racing import RacingVector
from paceline.memory.segment import Layout, Segment
from paceline.memory.slots import SlotPool
from paceline.memory.waiting import RunStopped

P = 7


def shared(kind, num_participants, **options):
    layout = Layout()
    start = layout.words("start", 1)
    plan = kind.reserve(layout, P, num_participants, **options)
    segment = Segment.create(layout.size_bytes)
    kind(segment, plan, 0).initialise(torch.zeros(P))
    return segment, start, plan


@pytest.mark.parametrize("kind", [RacingVector, LockedVector, SlotPool])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_resumed_run_begins_at_its_version(kind, dtype):
    layout = Layout()
    plan = kind.reserve(layout, P, 2, num_evaluators=1, dtype=dtype)
    segment = Segment.create(layout.size_bytes)
    kind(segment, plan, 0).initialise(torch.arange(P), version=41)
    evaluator = kind(segment, plan, 1)
    out = torch.empty(P, dtype=dtype)
    assert evaluator.snapshot(out) == evaluator.version == 41
    assert torch.equal(out, torch.arange(P).to(dtype))


@pytest.mark.parametrize("kind", [RacingVector, LockedVector, SlotPool])
def test_recovering_a_worker_that_held_nothing_changes_nothing(kind):
    segment, _, plan = shared(kind, 3)
    vector = kind(segment, plan, 0)
    assert vector.recover(2, incarnation=0) is False
    assert vector.version == 0


@pytest.mark.parametrize("kind", ["mutex", "rwlock"])
@pytest.mark.parametrize("backoff_s", [None, 20e-6])
def test_a_locked_vector_loses_no_update(workers, kind, backoff_s):
    segment, start, plan = shared(LockedVector, 3)
    for worker in range(3):
        workers.start(programs.update_locked, segment, start, plan, worker, 3, 500, kind, backoff_s)
    workers.join()
    vector = LockedVector(segment, plan, 0, kind=kind)
    assert vector.version == 1500
    assert (vector.x == 1500).all()


def test_a_locked_vector_accounts_only_for_time_that_it_waited():
    segment, _, plan = shared(LockedVector, 2)
    abort = segment.address + plan.at["x"]  # any word that we can set
    holder = LockedVector(segment, plan, 0)
    waiter = LockedVector(segment, plan, 1, abort_address=abort)
    asked = []
    backing_off = LockedVector(segment, plan, 1, abort_address=abort)
    backing_off.backoff = lambda attempt: asked.append(attempt) or 0.0
    with waiter.reading():
        pass
    assert waiter.waited_s == 0.0
    store(abort, 1)
    with holder.writing():
        for vector in (waiter, backing_off):
            with pytest.raises(RunStopped), vector.reading():
                pass
            assert vector.waited_s > 0.0
    assert asked == [0]


def test_advance_outside_writing_is_an_error():
    segment, _, plan = shared(LockedVector, 2)
    vector = LockedVector(segment, plan, 0)
    with pytest.raises(RuntimeError, match="inside `with writing"):
        vector.advance()
    with vector.writing():
        assert vector.advance() == 1


def test_racing_versions_are_exact_and_components_of_one_worker_keep_all_updates(workers):
    segment, start, plan = shared(RacingVector, 3)
    for worker in range(3):
        workers.start(programs.update_racing, segment, start, plan, worker, 3, 1000)
    workers.join()
    vector = RacingVector(segment, plan, 0)
    assert vector.version == 3000
    assert vector.x[:3].tolist() == [1000.0] * 3


@pytest.mark.parametrize("kind", ["mutex", "rwlock"])
@pytest.mark.parametrize(
    ("fail_point", "version", "torn"),
    [
        ("lock.taken#1", 0, False),  # killed while reading
        ("lock.taken#6", 2, False),  # killed with the write side, before the first write
        ("locked.mid_write#3", 2, True),
    ],
)
def test_a_locked_vector_goes_on_after_a_kill(workers, kind, fail_point, version, torn):
    segment, start, plan = shared(LockedVector, 2)
    workers.run_killed(programs.update_locked, segment, start, plan, 0, 1, 100, kind, None, fail_point=fail_point)
    supervisor = LockedVector(segment, plan, 1, kind=kind)
    assert supervisor.version == version
    assert supervisor.recover(0, incarnation=0) is torn
    assert supervisor.recover(0, incarnation=0) is False
    back = LockedVector(segment, plan, 0, incarnation=1, kind=kind)
    with back.writing():
        assert back.advance() == version + 1


def test_a_racing_vector_knows_that_a_worker_was_killed_while_it_wrote(workers):
    segment, start, plan = shared(RacingVector, 2)
    workers.run_killed(programs.update_racing, segment, start, plan, 0, 1, 100, fail_point="racing.mid_write#3")
    supervisor = RacingVector(segment, plan, 1)
    assert supervisor.version == 2
    assert supervisor.recover(0, incarnation=1) is False
    assert supervisor.recover(0, incarnation=0) is True
    assert supervisor.recover(0, incarnation=0) is False


# Each worker's update calls latest() twice.
@pytest.mark.parametrize(
    ("fail_point", "version"),
    [("slots.hazard_set#1", 0), ("slots.hazard_set#6", 2), ("slots.claimed#3", 2), ("slots.published#3", 3)],
)
def test_a_slot_pool_goes_on_after_a_kill_with_all_its_slots(workers, fail_point, version):
    segment, start, plan = shared(SlotPool, 2)
    workers.run_killed(programs.update_slots, segment, start, plan, 0, 1, 100, fail_point=fail_point)
    supervisor = SlotPool(segment, plan, 1)
    assert supervisor.version == version
    out = torch.empty(P)
    supervisor.snapshot(out)
    assert (out[2:] == version).all()

    assert supervisor.recover(0, incarnation=0) is False
    back = SlotPool(segment, plan, 0, incarnation=1)
    # All slots but the head can be had again: the dead one holds none.
    claimed = {back.claim().slot for _ in range(plan.num_slots - 1)}
    assert claimed == set(range(plan.num_slots)) - {supervisor.latest().slot}


def test_untouched_slots_take_no_physical_memory():
    layout = Layout()
    num_parameters = 1 << 18  # 1 MiB
    plan = SlotPool.reserve(layout, num_parameters, 8)
    segment = Segment.create(layout.size_bytes)
    pool = SlotPool(segment, plan, 0)
    pool.initialise(torch.ones(num_parameters))
    for _ in range(5):
        after, new = pool.latest(), pool.claim()
        new.x.copy_(after.x)
        pool.leave()
        assert pool.publish(new, after)
    assert pool.touched_slots() == 2
    assert plan.num_slots == 17
    assert os.fstat(segment.fd).st_blocks * 512 < 2.2 * (1 << 20)
