import threading

import pytest
import torch

import forked
from memory import programs
from paceline.errors import WorkerLostError
from paceline.memory.atomics import load, store
from paceline.memory.collectives import SharedMemoryCollectives
from paceline.memory.segment import Layout, Segment
from paceline.memory.waiting import RunStopped, wait_briefly

ROUNDS = 3


def reduced(workers, num_workers, num_parameters, weights):
    """The means that each worker got, (workers, rounds, P), and the gradients, (rounds, workers, P)."""
    layout = Layout()
    plan = SharedMemoryCollectives.reserve(layout, num_parameters, num_workers)
    results = layout.reserve("results", num_workers * ROUNDS * num_parameters * 4)
    segment = Segment.create(layout.size_bytes)
    for worker in range(num_workers):
        workers.start(programs.reduce_rounds, segment, plan, worker, ROUNDS, weights, results, num_workers)
    workers.join()
    gradients = torch.stack(
        [
            torch.stack(
                [programs.gradient(num_workers, number, worker, num_parameters) for worker in range(num_workers)]
            )
            for number in range(ROUNDS)
        ]
    )
    return segment.tensor(results, (num_workers, ROUNDS, num_parameters), torch.float32), gradients


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("num_parameters", [4, 1001])
def test_equal_weights_give_the_plain_mean_bit_for_bit(workers, num_workers, num_parameters):
    means, gradients = reduced(workers, num_workers, num_parameters, [64] * num_workers)
    total = gradients[:, 0].clone()
    for worker in range(1, num_workers):
        total += gradients[:, worker]
    for worker in range(num_workers):
        assert torch.equal(means[worker], total / num_workers)


def test_unequal_weights_give_the_mean_over_all_samples_and_everyone_the_same_bits(workers):
    weights = [0.0, 10.0, 3.0]
    means, gradients = reduced(workers, 3, 1001, weights)
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])
    expected = (gradients.double() * torch.tensor(weights).view(1, 3, 1)).sum(1) / sum(weights)
    torch.testing.assert_close(means[0].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_single_weighted_vector_comes_back_bit_for_bit(workers):
    means, gradients = reduced(workers, 3, 100, [0.0, 0.7, 0.0])
    for worker in range(3):
        assert torch.equal(means[worker], gradients[:, 1])


def test_without_any_weight_the_mean_is_zero(workers):
    means, _ = reduced(workers, 2, 10, [0.0, 0.0])
    assert not means.any()


def collectives_of(num_workers, **options):
    layout = Layout()
    abort = layout.words("abort", 1)
    plan = SharedMemoryCollectives.reserve(layout, 5, num_workers)
    segment = Segment.create(layout.size_bytes)
    abort_address = segment.address + abort
    members = [
        SharedMemoryCollectives(segment, plan, worker, abort_address=abort_address, **options)
        for worker in range(num_workers)
    ]
    return members, abort_address, segment, plan


def test_alone_nothing_is_touched():
    (alone,), *_ = collectives_of(1)
    vector = torch.tensor([-0.0, 1e-45, float("inf"), 3.0, float("nan")])
    before = vector.clone()
    alone.all_reduce_mean(vector, 0.3)
    assert torch.equal(vector.view(torch.int32), before.view(torch.int32))
    assert alone.waited_s == 0.0


def test_a_lost_worker_ends_the_wait_and_the_message_names_it():
    members, _, segment, plan = collectives_of(4)
    errors = {}

    def reduce(worker):
        try:
            members[worker].all_reduce_mean(torch.zeros(5), 1.0)
        except WorkerLostError as error:
            errors[worker] = str(error)

    threads = [threading.Thread(target=reduce, args=(worker,)) for worker in (0, 1, 3)]
    for thread in threads:
        thread.start()
    for worker in (0, 1, 3):
        while not load(segment.address + plan.at["arrivals"] + worker * 64):
            wait_briefly(segment.address + plan.at["arrivals"] + worker * 64, 0)
    members[0].mark_lost(2)
    for thread in threads:
        thread.join(forked.AGAINST_HANGS_S)
    assert sorted(errors) == [0, 1, 3]
    for message in errors.values():
        assert message.startswith("all-reduce 1: workers 0, 1 and 3 arrived, worker 2 did not")
        assert "killed" in message
        assert "--resume RUN" in message
    assert members[0].waited_s > 0.0


def test_a_worker_killed_after_it_arrived_is_missed_at_the_second_barrier(workers):
    layout = Layout()
    plan = SharedMemoryCollectives.reserve(layout, 5, 2)
    results = layout.reserve("results", 1000)
    segment = Segment.create(layout.size_bytes)
    arguments = (segment, plan, 0, ROUNDS, [1.0, 1.0], results, 0)
    workers.run_killed(programs.reduce_rounds, *arguments, fail_point="lockstep.arrived#1")
    other = SharedMemoryCollectives(segment, plan, 1)
    other.mark_lost(0)
    with pytest.raises(WorkerLostError, match="all-reduce 1: worker 1 arrived, worker 0 did not"):
        other.all_reduce_mean(torch.zeros(5), 1.0)


def test_a_worker_that_nobody_declared_lost_is_not_waited_for_without_end():
    members, *_ = collectives_of(2, timeout_s=0.01)
    with pytest.raises(WorkerLostError, match=r"worker 0 arrived, worker 1 did not.*within 0\.01 s"):
        members[0].all_reduce_mean(torch.zeros(5), 1.0)


def test_a_stopped_run_ends_between_two_rounds():
    """A stop alone ends no wait, or one worker would make the update of a round and another not; a leaver does."""
    members, abort_address, *_ = collectives_of(2, timeout_s=0.01)
    store(abort_address, 1)
    with pytest.raises(WorkerLostError, match="did not arrive within"):
        members[0].all_reduce_mean(torch.zeros(5), 1.0)
    members, abort_address, *_ = collectives_of(2)
    store(abort_address, 1)
    members[0].mark_lost(1)
    with pytest.raises(RunStopped):
        members[0].all_reduce_mean(torch.zeros(5), 1.0)
