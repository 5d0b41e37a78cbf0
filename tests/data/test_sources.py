from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.data.plan import BatchPlan, Fixed
from paceline.data.round_deal import Left
from paceline.data.sources import ABSENT, END, BatchClaims, DatasetBatches
from paceline.memory.atomics import load
from paceline.memory.segment import Layout, Segment


@pytest.fixture
def counter():
    layout = Layout()
    offset = layout.words("next", 1)
    segment = Segment.create(layout.size_bytes)
    yield segment.address + offset
    segment.close()


def claims(counter, worker_id=0, num_workers=2, plan=None, lockstep=False, **limits):
    plan = replace(plan or BatchPlan(num_samples=10, batch_size=3), num_workers=num_workers)
    return BatchClaims(plan, worker_id=worker_id, lockstep=lockstep, counter=counter, **limits)


def drain(source):
    found = []
    while (number := source.next()) != END:
        found.append(number)
    return found


def test_a_free_worker_takes_the_next_batch(counter):
    one, other = (claims(counter, worker, max_epochs=2) for worker in range(2))
    assert [one.next(), one.next(), other.next(), one.next()] == [0, 1, 2, 3]
    assert drain(other) == [4, 5, 6, 7]
    assert one.next() == END
    assert (one.taken, other.taken) == (3, 5)


def test_parts_of_epochs_and_steps(counter):
    assert drain(claims(counter, max_epochs=0.6)) == [0, 1, 2]
    assert load(counter) == 4  # one more, to learn of the end
    assert drain(claims(counter, max_steps=2)) == [4, 5]
    assert load(counter) == 6  # a worker that has its steps claims nothing


def test_lockstep_deals_rounds_and_absent_ones_take_part(counter):
    both = [drain(claims(counter, worker, 3, lockstep=True, max_epochs=2)) for worker in range(3)]
    assert both == [[0, 3, 4, 7], [1, ABSENT, 5, ABSENT], [2, ABSENT, 6, ABSENT]]
    assert load(counter) == 0


def test_a_part_of_an_epoch_ends_within_a_round_of_fewer_workers(counter):
    source = claims(counter, 3, 4, BatchPlan(num_samples=12, batch_size=1), lockstep=True, max_epochs=0.6, tracks=True)
    assert source.next() == 3
    source.deal.meet([0, 2, 3])  # the next rounds have batches 1, 4, 5, and 6, 7
    assert drain(source) == [5, ABSENT]
    assert source.left() == Left(8, []), "a resumed run trains on the batch that this worker did not get"


def test_a_resumed_run_that_is_stopped_before_its_first_batch_leaves_what_it_was_left(counter):
    plan = BatchPlan(num_samples=12, batch_size=1)
    source = claims(counter, 0, 2, plan, lockstep=True, max_epochs=2, left=Left(18, [14, 15]), tracks=True)
    assert source.left() == Left(18, [14, 15])
    source.next()
    assert source.left() == Left(18, [])


def test_own_parts(counter):
    plan = BatchPlan(num_samples=10, batch_size=2, partition=Fixed(), num_workers=2)
    assert [drain(claims(counter, worker, plan=plan, max_epochs=2)) for worker in range(2)] == [
        [0, 1, 2, 6, 7, 8],
        [3, 4, 5, 9, 10, 11],
    ]


@pytest.mark.parametrize("lockstep", [False, True])
def test_taken_batches_are_not_taken_again(counter, lockstep):
    plan = BatchPlan(num_samples=10, batch_size=2, partition=Fixed(), num_workers=2)
    whole = drain(claims(counter, plan=plan, lockstep=lockstep, max_epochs=2))
    rest = drain(claims(counter, plan=plan, lockstep=lockstep, max_epochs=2, taken=4))
    assert rest == whole[4:]


def test_what_a_resumed_run_begins_with_is_not_handed_out_again(counter):
    """Batches 1, 4 and 5 had made updates of the checkpoint before their turn in this part of the run."""
    one, other = (claims(counter, worker, max_epochs=2, done={1, 4, 5}) for worker in range(2))
    assert [one.next() for _ in range(3)] == [0, 2, 3]
    assert [other.next(), one.next(), other.next()] == [6, 7, END]
    assert (one.taken, other.taken) == (4, 1)


def test_own_parts_go_on_behind_what_a_resumed_run_begins_with(counter):
    plan = BatchPlan(num_samples=10, batch_size=2, partition=Fixed(), num_workers=2)
    source = claims(counter, plan=plan, max_epochs=2, taken=1, done={1, 2})
    assert drain(source) == [6, 7, 8]
    assert source.taken == 6


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index**2


@pytest.mark.parametrize(
    "dataset",
    [Squares(), TensorDataset(torch.arange(10.0)[:, None], torch.arange(10) ** 2)],
    ids=["samples", "tensors"],
)
def test_batches_of_a_data_set(counter, dataset):
    plan, epochs = BatchPlan(num_samples=10, batch_size=3), []
    source = DatasetBatches(
        dataset, claims(counter, plan=plan, max_epochs=2), lambda epoch, first: epochs.append((epoch, first))
    )
    while (batch := source.next()) is not None:
        number, inputs, targets = batch
        assert inputs.flatten().tolist() == plan.indices(number).tolist()
        assert targets.tolist() == (plan.indices(number) ** 2).tolist()
    assert epochs == [(0, True), (1, True)]


def test_an_absent_worker_gets_no_samples(counter):
    source = DatasetBatches(Squares(), claims(counter, 2, 3, lockstep=True, max_epochs=1))
    assert source.next()[0] == 2
    assert source.next() == (-1, None, None)
    assert source.next() is None


def test_a_batch_of_an_earlier_epoch_begins_no_epoch():
    plan, epochs = BatchPlan(num_samples=4, batch_size=2), []
    handed = SimpleNamespace(plan=plan, indices=plan.indices, next=iter([0, 2, 1, 3]).__next__)
    samples = TensorDataset(torch.arange(4), torch.arange(4))
    source = DatasetBatches(samples, handed, lambda *about: epochs.append(about))
    assert [source.next()[0] for _ in range(4)] == [0, 2, 1, 3]
    assert epochs == [(0, True), (1, True)]
