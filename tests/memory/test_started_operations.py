"""Operations that are started first and waited for later, on shared memory."""

import threading

import pytest
import torch

from paceline.errors import WorkerLostError
from paceline.memory.atomics import load
from paceline.memory.collectives import SharedMemoryCollectives
from paceline.memory.segment import LINE_BYTES, Layout, Segment
from paceline.memory.waiting import wait_briefly

P = 1000


def run(num_workers, program, **options):
    """`program(worker_id, collectives)` in a thread per worker; what each returned, or the error that it raised."""
    layout = Layout()
    plan = SharedMemoryCollectives.reserve(layout, P, num_workers)
    segment = Segment.create(layout.size_bytes)
    results = [None] * num_workers

    def work(worker):
        try:
            results[worker] = program(worker, SharedMemoryCollectives(segment, plan, worker, **options))
        except WorkerLostError as error:
            results[worker] = error

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def vector(worker, length, number=0):
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * number + worker))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("lengths", [[1], [P], [300, 16, 684], [P, 7, P, 3]])
def test_sums_of_several_vectors_and_a_number(num_workers, lengths):
    def program(worker, collectives):
        sums = []
        for number in range(3):
            count = torch.tensor([worker + 1.0], dtype=torch.float64)
            vectors = [vector(worker, length, number) for length in lengths]
            handles = [collectives.start_all_reduce(one) for one in (count, *vectors)]
            for handle in reversed(handles):
                handle.wait()
            sums.append((count.item(), vectors))
        return sums

    results = run(num_workers, program)
    for number in range(3):
        expected = []
        for length in lengths:
            total = vector(0, length, number)
            for worker in range(1, num_workers):
                total += vector(worker, length, number)
            expected.append(total)
        for result in results:
            count, sums = result[number]
            assert count == num_workers * (num_workers + 1) / 2
            assert all(torch.equal(one, other) for one, other in zip(sums, expected, strict=True))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_pieces_for_everyone_come_from_everyone(num_workers, dtype):
    def program(worker, collectives):
        found = []
        for number in range(2):
            given = (torch.arange(num_workers * 7) + 40 * worker + number).to(dtype)
            taken, summed = torch.empty_like(given), vector(worker, 10, number)
            handles = [collectives.start_all_to_all(given, taken), collectives.start_all_reduce(summed)]
            for handle in handles:
                handle.wait()
            found.append(taken)
        return found

    for worker, found in enumerate(run(num_workers, program)):
        for number, taken in enumerate(found):
            expected = [40 * other + 7 * worker + at + number for other in range(num_workers) for at in range(7)]
            assert taken.tolist() == expected


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_scattered_sums_gathered_again_are_the_sum(num_workers):
    length = 60

    def program(worker, collectives):
        x, part, again = vector(worker, length), torch.empty(length // num_workers), torch.empty(length)
        summed = vector(worker, length)
        scattered = collectives.start_reduce_scatter(x, part)
        reduced = collectives.start_all_reduce(summed)
        scattered.wait()
        collectives.start_all_gather(part, again).wait()
        reduced.wait()
        return summed, part, again, x

    results = run(num_workers, program)
    for worker, (summed, part, again, x) in enumerate(results):
        assert torch.equal(summed, results[0][0])
        assert torch.equal(part, summed.chunk(num_workers)[worker])
        assert torch.equal(again, summed)
        assert torch.equal(x, vector(worker, length))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_what_has_a_root_comes_from_it_or_comes_to_it(num_workers):
    length = 20

    def program(worker, collectives):
        sent = [vector(worker, length, root) for root in range(num_workers)]
        summed = [vector(worker, length, 50 + root) for root in range(num_workers)]
        handles = [collectives.start_broadcast(one, root) for root, one in enumerate(sent)]
        handles += [collectives.start_reduce(one, root) for root, one in enumerate(summed)]
        for handle in handles:
            handle.wait()
        return sent, summed[worker]

    for worker, (sent, mine) in enumerate(run(num_workers, program)):
        for root, one in enumerate(sent):
            assert torch.equal(one, vector(root, length, root))
        total = vector(0, length, 50 + worker)
        for other in range(1, num_workers):
            total += vector(other, length, 50 + worker)
        assert torch.equal(mine, total)


def test_a_mean_comes_after_what_was_started_before_it():
    def program(worker, collectives):
        first, second = torch.full((4,), worker + 1.0), torch.full((P,), worker + 1.0)
        handle = collectives.start_all_reduce(first)
        collectives.all_reduce_mean(second, 1.0)
        handle.wait()
        return first.tolist(), second.unique().tolist()

    assert run(3, program) == [([6.0] * 4, [2.0])] * 3


def test_a_missing_worker_is_named_and_not_waited_for_without_end():
    def program(worker, collectives):
        if worker == 0:  # it would call worker 2 missing, too, which may be waiting for a core
            address = collectives._arrivals + 2 * LINE_BYTES
            while not load(address):
                wait_briefly(address, 0)
        if worker != 1:
            collectives.start_all_reduce(torch.ones(3)).wait()

    first, second, third = run(3, program, timeout_s=0.05)
    assert second is None
    assert "worker 1 did not" in str(first)
    assert isinstance(third, WorkerLostError)
