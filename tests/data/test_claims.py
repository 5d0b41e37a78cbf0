"""Which batches of an epoch a loop's workers take: however they come, leave and come back."""

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data.claims import WorkerClaims
from paceline.data.epoch_claims import LocalEpochClaims
from paceline.data.loader_batches import shared_batches
from paceline.data.round_deal import Left
from paceline.data.sources import ABSENT, END
from paceline.memory import epoch_claims
from paceline.memory.atomics import load
from paceline.memory.epoch_claims import SharedEpochClaims
from paceline.memory.segment import Layout, Segment


def in_shared_memory():
    layout = Layout()
    offset = SharedEpochClaims.reserve(layout, 2)
    return SharedEpochClaims(Segment.create(layout.size_bytes), offset, 2)


@pytest.fixture(params=[in_shared_memory, LocalEpochClaims])
def counts(request):
    return request.param()


def claims(counts, worker_id=0, num_workers=2, num_batches=5, lockstep=False, **more):
    batches = shared_batches([torch.zeros(1)] * num_batches, 0)
    return WorkerClaims(batches, worker_id=worker_id, num_workers=num_workers, lockstep=lockstep, counts=counts, **more)


def epoch(one, number, most=99):
    one.begin(number)
    found = []
    while len(found) < most and (batch := one.next()) != END:
        found.append(batch)
    return found


def test_a_free_worker_takes_the_next_batch(counts):
    one, other = claims(counts), claims(counts, 1)
    one.begin(0)
    other.begin(0)
    assert [one.next(), one.next(), other.next(), one.next(), other.next()] == [0, 1, 2, 3, 4]
    assert [one.next(), other.next()] == [END, END]
    assert epoch(other, 1) == [5, 6, 7, 8, 9]


def test_a_worker_that_leaves_an_epoch_leaves_the_rest_of_it_to_the_others(counts):
    one, other = claims(counts), claims(counts, 1)
    assert epoch(one, 0, most=2) == [0, 1]
    assert epoch(one, 1, most=1) == [5]
    assert epoch(other, 0) == [2, 3, 4]
    assert epoch(other, 1) == [6, 7, 8, 9]


def test_lockstep_deals_rounds_and_absent_ones_take_part(counts):
    both = [claims(counts, worker, 3, lockstep=True) for worker in range(3)]
    assert [epoch(one, 0) for one in both] == [[0, 3], [1, 4], [2, ABSENT]]
    assert [epoch(one, 1, most=1) for one in both] == [[5], [6], [7]]
    assert [epoch(one, 2) for one in both] == [[10, 13], [11, 14], [12, ABSENT]]


def test_lockstep_goes_on_where_it_was(counts):
    one = claims(counts, lockstep=True, taken=4, left=Left(7, []))
    assert epoch(one, 0) == []
    assert epoch(one, 1) == [7, 9]


def test_more_or_fewer_workers_go_on_in_the_middle_of_an_epoch(counts):
    """Two workers had trained on batches 0 to 4, but for the third, which went back as its worker died."""
    three = [claims(counts, worker, 3, 9, lockstep=True, left=Left(5, [2])) for worker in range(3)]
    assert [epoch(one, 0) for one in three] == [[2, 7], [5, 8], [6, ABSENT]]
    assert [epoch(one, 1) for one in three] == [[9, 12, 15], [10, 13, 16], [11, 14, 17]]


def test_a_resumed_run_hands_out_what_is_left(counts):
    """It begins at batch 6; batches 7 and 11 had made updates of the checkpoint before their turn."""
    one, other = (claims(counts, worker, left=Left(6, []), done={7, 11}) for worker in range(2))
    assert epoch(one, 0) == []
    assert epoch(one, 1, most=1) == [6]
    assert epoch(other, 0) == []
    assert epoch(other, 1) == [8, 9]
    assert epoch(one, 2) == [10, 12, 13, 14]


@pytest.mark.parametrize("meanwhile", range(8))
def test_workers_that_compare_their_data_at_once_find_the_first_difference(meanwhile, monkeypatch):
    """The other worker compares after this one has read so many words."""
    counts, own, others, agreed = in_shared_memory(), [5, 21, 31, 41], [5, 20, 30, 40], []
    words = iter(range(100))

    def interrupted(word):
        if next(words) == meanwhile:
            agreed.extend(counts.agree(0, others))
        return load(word)

    monkeypatch.setattr(epoch_claims, "load", interrupted)
    found = counts.agree(0, own)
    theirs = agreed or counts.agree(0, others)
    assert (found == own) != (theirs == others), "one of them was first"
    assert found[:2] == theirs[:2]


def test_epochs_that_are_long_over():
    counts = in_shared_memory()
    one, slow = claims(counts), claims(counts, 1)
    for number in range(70):
        assert epoch(one, number, most=1) == [5 * number]
    assert (epoch(slow, 0), epoch(slow, 69)) == ([], [346, 347, 348, 349])
    assert counts.newest() == 69


class Odd(torch.utils.data.Sampler):
    """Epochs of 1, 2, 3 ... batches of two."""

    def __init__(self):
        self.epochs = 0

    def __iter__(self):
        self.epochs += 1
        return iter([[2 * index, 2 * index + 1] for index in range(self.epochs)])


@pytest.mark.parametrize("lockstep", [False, True])
def test_epochs_may_differ_in_length(counts, lockstep):
    def made():
        return shared_batches(DataLoader(range(20), batch_sampler=Odd()), 0)

    both = [
        WorkerClaims(made(), worker_id=worker, num_workers=2, lockstep=lockstep, counts=counts) for worker in range(2)
    ]
    for number in range(4):
        taken = [[one.place(batch) for batch in epoch(one, number) if batch != ABSENT] for one in both]
        assert sorted(taken[0] + taken[1]) == list(range(number + 1))
    assert both[0].batches.length is None
