"""`shares=auto`: how the workers' speeds become sizes of batches."""

import itertools
import random
from types import SimpleNamespace

import pytest

import paceline as pl
from paceline.algorithms.shares import MEETINGS_BETWEEN, SharesBySpeed, limited, next_sizes
from paceline.ports.round_shares import RoundShares, divided, num_parts

WORKERS = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_parts_add_up_and_follow_the_weights(num_workers):
    draw = random.Random(num_workers)
    for _ in range(300):
        total = draw.randrange(1, 500)
        weights = tuple(draw.choice((0, 1, 3, 10**9, draw.randrange(1, 1000))) for _ in range(num_workers))
        sizes = divided(total, weights)
        assert sum(sizes) == total
        if total < num_workers:
            assert sizes == (1,) * total + (0,) * (num_workers - total)
            continue
        assert min(sizes) >= 1
        by_weight = sorted(zip(weights, sizes, strict=True))
        assert [size for _, size in by_weight] == sorted(size for _, size in by_weight), "a larger weight has no less"
        if all(total * weight >= sum(weights) for weight in weights):
            for size, weight in zip(sizes, weights, strict=True):
                assert abs(size - total * weight / max(1, sum(weights))) < 1 or not sum(weights)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_equal_weights_have_equal_parts(num_workers):
    for total in range(num_workers, 60):
        sizes = divided(total, (7,) * num_workers)
        assert max(sizes) - min(sizes) <= 1
        assert list(sizes) == sorted(sizes, reverse=True)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_epochs_have_a_part_for_each_worker_where_there_are_samples(num_workers):
    for batch_size in (1, 3):
        for samples in range(1, 40):
            sizes = []
            for first in range(0, samples, num_workers * batch_size):
                sizes += filter(None, divided(min(num_workers * batch_size, samples - first), (1,) * num_workers))
            assert num_parts(samples, batch_size, num_workers) == len(sizes)


@pytest.mark.parametrize("num_workers", WORKERS[1:])
def test_the_slowest_worker_is_as_soon_ready_as_whole_samples_allow(num_workers):
    draw = random.Random(10 + num_workers)
    for _ in range(200):
        sizes = (draw.randrange(1, 200),) * num_workers
        times_s = tuple(draw.choice((1e-6, 1e-3, 3.0)) * draw.uniform(1, 3) for _ in range(num_workers))
        found = next_sizes(sizes, times_s)
        assert sum(found) == sum(sizes)
        before_s, after_s = (max(n * t for n, t in zip(all_, times_s, strict=True)) for all_ in (sizes, found))
        assert found == sizes or after_s < 0.95 * before_s
        ideal_s = sum(sizes) / sum(1 / one for one in times_s)
        if found != sizes and min(found) > 1:
            assert after_s <= ideal_s + max(times_s)
        assert next_sizes(found, times_s) == found, "sizes that fit the speeds stay"


def test_small_differences_change_nothing_and_a_recovered_worker_gets_its_share_back():
    equal = (64, 64, 64)
    assert next_sizes(equal, (1.0, 1.04, 0.97)) == equal
    uneven = next_sizes(equal, (1.0, 1.0, 3.0))
    assert uneven == (82, 82, 28)
    assert next_sizes(uneven, (1.0, 1.0, 1.0)) == equal
    assert next_sizes(equal, (1.0, 0.0, 3.0)) == equal, "a worker that has not been measured"
    assert next_sizes((1, 1), (1.0, 100.0)) == (1, 1), "nothing to divide"


def test_a_very_slow_worker_keeps_one_sample_and_comes_back():
    sizes = next_sizes((8, 8), (1.0, 1e9))
    assert sizes == (15, 1)
    assert next_sizes(sizes, (1.0, 1.0)) == (8, 8)


def test_rounds_are_cut_as_they_were_when_they_were_claimed():
    shares = RoundShares(2, batch_size=6)
    assert [shares.part(round, 12, 2 * round + 1) for round in (0, 9)] == [range(6, 12)] * 2
    shares.change((9, 3), from_round=4)
    shares.change((8, 4), from_round=6)
    assert [len(shares.part(round, 12, 2 * round + 1)) for round in range(8)] == [6, 6, 6, 6, 3, 3, 4, 4]
    assert shares.part(5, 4, 11) == range(3, 4), "an epoch's last round, in the same proportion"
    assert [len(shares.part(7, 1, place)) for place in (14, 15)] == [1, 0]
    shares.know_batch_size(99)
    assert shares.sizes == (8, 4), "what has been measured stays"


def dealt(shares, rounds, samples):
    """The sizes of the batches of these rounds, one after the other."""
    parts = [
        [shares.part(round, samples, round * shares.num_workers + own) for own in range(shares.num_workers)]
        for round in rounds
    ]
    for one in parts:
        assert [number for part in one for number in part] == list(range(samples)), "each sample once"
    return [len(part) for one in parts for part in one]


def test_members_that_take_turns_from_another_place_get_their_own_sizes():
    shares = RoundShares(3, batch_size=4)
    shares.change((7, 3, 2), from_round=2, first=1)
    assert dealt(shares, range(2, 4), 12) == [2, 7, 3, 2, 7, 3]
    shares.change((6, 2), from_round=4, first=0)  # in rounds of two
    assert dealt(shares, range(4, 6), 12) == [5, 2, 5, 3, 7, 2]
    shares.change((4,), from_round=6, first=0)
    assert dealt(shares, range(6, 7), 11) == [4, 4, 3]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_whatever_changes_each_sample_comes_once(num_workers):
    draw = random.Random(30 + num_workers)
    shares = RoundShares(num_workers, batch_size=3)
    for round in range(0, 60, 3):
        sizes = tuple(draw.randrange(1, 9) for _ in range(draw.randrange(1, num_workers + 1)))
        shares.change(sizes, from_round=round + 1, first=draw.randrange(len(sizes)))
        for samples in (3 * num_workers, draw.randrange(1, 3 * num_workers + 1)):
            dealt(shares, range(round, round + 4), samples)
        other = RoundShares(num_workers, batch_size=3)
        other.take_over(shares.changes(round + 1))
        assert dealt(other, range(round + 1, round + 9), 7) == dealt(shares, range(round + 1, round + 9), 7)


def test_rounds_that_others_may_have_claimed_do_not_change():
    shares = RoundShares(3)
    shares.claim(epoch=2, numbers=7, place=0)
    assert shares.next_round == 6
    shares.claim(epoch=2, numbers=7, place=4)
    assert shares.next_round == 8
    shares.claim(epoch=2, numbers=7, place=3)
    assert shares.next_round == 8, "a batch that has been looked at keeps its samples"


def test_one_disturbed_step_is_no_change():
    shares = RoundShares(2)
    for work_s in (1.0, 1.0, 50.0, 1.0, 1.0):
        shares.note(10, work_s)
    assert shares.time_per_sample_s() == pytest.approx(0.1)
    assert shares.time_per_sample_s() == 0.0, "since it was asked last"


def test_two_slow_steps_at_the_start_are_no_slow_worker():
    shares = RoundShares(2)
    for work_s in (130.0, 31.0, 1.0, 1.1):
        shares.note(10, work_s)
    assert shares.time_per_sample_s() == pytest.approx(0.11)


def met_again_and_again(sizes, step_s, meetings):
    """The sizes after every measurement; `step_s`: of worker and size."""
    shares = RoundShares(len(sizes), sum(sizes) // len(sizes))
    shares.sizes = sizes

    class Collectives:
        def start_all_reduce(self, vector):
            times_s = [step_s(worker, size) / size for worker, size in enumerate(shares.sizes)]
            vector.view(2, len(sizes))[0] = vector.new_tensor(times_s)
            return SimpleNamespace(wait=lambda: None)

    ports = SimpleNamespace(worker_id=0, num_workers=len(sizes), collectives=Collectives())
    program = SharesBySpeed(SimpleNamespace(shares=shares, deal=None), ports)
    found = []
    for _ in range(meetings):
        program.meet()
        found.append(shares.sizes)
    return found[MEETINGS_BETWEEN - 1 :: MEETINGS_BETWEEN]


def test_one_disturbed_measurement_takes_no_worker_to_a_single_sample():
    disturbed = iter([16.0])
    found = met_again_and_again((8, 8, 8), lambda worker, _: next(disturbed, 1.0) if worker == 2 else 1.0, 50)
    assert min(min(sizes) for sizes in found) >= 2, "where a step takes as long whatever its batch is"


def test_sizes_come_to_where_a_very_slow_and_a_recovered_worker_belong():
    slow = met_again_and_again((64, 64), lambda worker, size: size * (1000.0 if worker else 1.0), 60)
    assert slow[0] == (102, 26)
    assert slow[-1] == (127, 1)
    back = met_again_and_again((127, 1), lambda _, size: float(size), 60)
    assert back[-1] == (64, 64)
    assert all(before[1] <= after[1] for before, after in itertools.pairwise(back))


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_limited_change_goes_towards_what_is_wanted(num_workers):
    draw = random.Random(20 + num_workers)
    for _ in range(200):
        total = draw.randrange(num_workers, 400)
        sizes, wanted = (divided(total, tuple(draw.randrange(1, 1000) for _ in range(num_workers))) for _ in range(2))
        found = limited(sizes, wanted)
        assert sum(found) == total
        assert min(found) >= 1
        if all(size <= 2 * new and new <= 2 * size for size, new in zip(sizes, wanted, strict=True)):
            assert found == wanted


def test_sizes_change_every_few_meetings_from_a_round_that_nobody_has_claimed():
    replicas = [SimpleNamespace(shares=RoundShares(2), deal=None) for _ in range(2)]
    told = [[0.3, 0.1], [9, 7]]
    meetings = []

    class Collectives:
        def start_all_reduce(self, vector):
            own = vector.view(2, 2)[:, ports.worker_id].tolist()
            assert own == [told[0][ports.worker_id], told[1][ports.worker_id]]
            vector.view(2, 2)[:] = vector.new_tensor(told)
            return SimpleNamespace(wait=lambda: None)

    for worker, replica in enumerate(replicas):
        ports = SimpleNamespace(worker_id=worker, num_workers=2, collectives=Collectives())
        replica.shares.know_batch_size(20)
        program = SharesBySpeed(replica, ports)
        for meeting in range(1, MEETINGS_BETWEEN + 1):
            replica.shares.note(20, 20 * told[0][worker])
            replica.shares.next_round = told[1][worker]
            program.meet()
            meetings.append((meeting, replica.shares.sizes))
        assert dealt(replica.shares, range(8, 10), 40) == [20, 20, 10, 30]
    assert {sizes for meeting, sizes in meetings if meeting < MEETINGS_BETWEEN} == {(20, 20)}


def test_a_loop_with_batches_of_its_own_is_refused():
    ports = SimpleNamespace(worker_id=0, num_workers=2, collectives=None)
    with pytest.raises(pl.UsageError, match=r"this loop fetches its own batches.*worker\.batches"):
        SharesBySpeed(SimpleNamespace(shares=None), ports).meet()
