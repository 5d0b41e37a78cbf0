"""What the worker processes of these tests do. Vectors are small, and hold one number in all components when sound."""

import os

import torch

from paceline.memory import failpoints
from paceline.memory.atomics import compare_and_swap, fetch_add, load, store
from paceline.memory.collectives import SharedMemoryCollectives
from paceline.memory.locked import LockedVector
from paceline.memory.locks import Mutex, ReadWriteLock
from paceline.memory.racing import RacingVector
from paceline.memory.ring import RecordRing
from paceline.memory.slots import SlotPool
from paceline.memory.waiting import wait_briefly, wake
from paceline.records.step_record import RECORD_DTYPE


def run(name, fail_point, arguments):
    torch.set_num_threads(1)
    if fail_point:
        point, hit = fail_point.split("#")
        os.environ[failpoints.ENVIRONMENT_VARIABLE] = f"{point}@0#{hit}"
        failpoints.arm(0)
    globals()[name](*arguments)


def meet(address, count):
    """Goes on when `count` processes have come here, so that they really run at the same time."""
    fetch_add(address, 1)
    wake(address)
    while (arrived := load(address)) < count:
        wait_briefly(address, arrived)


def count_up(segment, start, word, num_workers, times):
    """Adds with both atomic operations that can add."""
    address = segment.address + word
    meet(segment.address + start, num_workers)
    for _ in range(times):
        fetch_add(address, 1)
        while not compare_and_swap(address, seen := load(address), seen + 1):
            pass


def change_and_wake(segment, word, value):
    store(segment.address + word, value)
    wake(segment.address + word)


def count_under_mutex(segment, start, lock, word, worker_id, num_workers, times):
    mutex = Mutex(segment, lock, worker_id)
    address = segment.address + word
    meet(segment.address + start, num_workers)
    for _ in range(times):
        mutex.acquire()
        store(address, load(address) + 1)  # loses updates if two are here
        mutex.release()


def count_under_write_lock(segment, start, lock, words, worker_id, num_workers, times):
    """Two words that only a writer may see apart."""
    both = ReadWriteLock(segment, lock, num_workers, worker_id)
    first, second = segment.address + words, segment.address + words + 64
    meet(segment.address + start, num_workers)
    for _ in range(times):
        both.acquire_write()
        store(first, load(first) + 1)
        store(second, load(second) + 1)
        both.release_write()
        both.acquire_read()
        assert load(first) == load(second)
        both.release_read()


def take_mutex(segment, lock):
    Mutex(segment, lock, participant_id=0).acquire()


def take_read_write_lock(segment, lock, num_participants, side):
    both = ReadWriteLock(segment, lock, num_participants, participant_id=0)
    (both.acquire_read if side == "read" else both.acquire_write)()


def update_locked(segment, start, plan, worker_id, num_workers, times, kind, backoff_s):
    vector = LockedVector(segment, plan, worker_id, kind=kind)
    vector.backoff = None if backoff_s is None else lambda attempt: backoff_s
    local = torch.empty(plan.num_parameters)
    meet(segment.address + start, num_workers)
    for _ in range(times):
        with vector.reading():
            local.copy_(vector.x)
        assert local.min() == local.max()
        with vector.writing():
            vector.x.add_(1)
            vector.advance()


def update_racing(segment, start, plan, worker_id, num_workers, times):
    vector = RacingVector(segment, plan, worker_id)
    meet(segment.address + start, num_workers)
    for _ in range(times):
        with vector.writing():
            vector.x[worker_id] += 1
        vector.advance()


def update_slots(segment, start, plan, worker_id, num_present, times, persistence=10**9):
    """Leashed-SGD with the gradient 1; the first components count each worker's own updates."""
    pool = SlotPool(segment, plan, worker_id)
    common = slice(plan.num_participants, None)
    meet(segment.address + start, num_present)
    for _ in range(times):
        view = pool.latest()
        assert view.x[common].min() == view.x[common].max() == view.version
        pool.leave()
        for _ in range(persistence):
            after = pool.latest()
            new = pool.claim()
            new.x.copy_(after.x)
            pool.leave()
            new.x[common] += 1
            new.x[worker_id] += 1
            if pool.publish(new, after):
                break
            pool.discard(new)


def watch_slots(segment, start, plan, evaluator_id, num_present, until_version):
    """An evaluator: no version that it sees is torn, and versions never go back."""
    pool = SlotPool(segment, plan, evaluator_id)
    own, common = slice(0, plan.num_participants), slice(plan.num_participants, None)
    out = torch.empty(plan.num_parameters)
    version = 0
    meet(segment.address + start, num_present)
    while version < until_version:
        newer = pool.snapshot(out)
        assert newer >= version
        version = newer
        assert out[common].min() == out[common].max() == version
        assert out[own].sum() == version


def record_of(number):
    return [kind.type(number).item() for kind, _ in RECORD_DTYPE.fields.values()]


def append_records(segment, plan, first, count):
    """Records whose fields are all the same number."""
    ring = RecordRing(segment, plan)
    for number in range(first, first + count):
        ring.append(*record_of(number))


def append_records_until_told(segment, plan, stop):
    ring = RecordRing(segment, plan)
    number = 0
    while not load(segment.address + stop):
        ring.append(*record_of(number))
        number += 1


def append_half_a_record(segment, plan):
    """What a kill inside `append` leaves: the bytes of a record, not announced."""
    append_records(segment, plan, 0, 3)
    torn = segment.array(plan.records, plan.capacity, f"V{RECORD_DTYPE.itemsize}")
    torn[3] = b"\xff" * RECORD_DTYPE.itemsize
    os.kill(os.getpid(), 9)


def reduce_rounds(segment, plan, worker_id, rounds, weights, results, seed):
    """Leaves the mean of each round in `results`, one row per worker and round."""
    collectives = SharedMemoryCollectives(segment, plan, worker_id)
    out = segment.tensor(results, (plan.num_participants, rounds, plan.num_parameters), torch.float32)
    for number in range(rounds):
        vector = gradient(seed, number, worker_id, plan.num_parameters)
        collectives.all_reduce_mean(vector, weights[worker_id])
        out[worker_id, number] = vector


def gradient(seed, number, worker_id, num_parameters):
    generator = torch.Generator().manual_seed(seed * 10_000 + number * 100 + worker_id)
    return torch.randn(num_parameters, generator=generator)
