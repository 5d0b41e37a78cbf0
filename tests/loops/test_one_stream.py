"""What cannot be indexed is read by all workers alike, whatever it draws; data that differ between workers are refused."""

import random
from collections import Counter
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import paceline as pl
from loops.coder import HELD_OUT, made, own_id
from loops.test_batches_object import in_epoch, leaving_after, loader, seen_by

METHODS = ["lockstep", "all-reduce", "local-sgd(period=3)", "hogwild", "ad-psgd", "parameter-server(mode=async)"]
ALL = list(range(64))


class Wrapped:
    """Around a loader, as prefetchers are."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        yield from self.inner


class Shuffled(IterableDataset):
    """Draws its order from all three generators."""

    def __iter__(self):
        order = list(ALL)
        random.shuffle(order)
        np.random.shuffle(order)
        return ((HELD_OUT[order[index]], order[index]) for index in torch.randperm(64).tolist())


class Moving(DataLoader):
    """A loader with an `__iter__` of its own."""

    def __iter__(self):
        for x, numbers in super().__iter__():
            yield x + 0, numbers


def minibatches():
    for numbers in torch.randperm(64).split(4):
        F.dropout(torch.ones(3))
        yield HELD_OUT[numbers], numbers


NUMBERED = TensorDataset(HELD_OUT, torch.arange(64))
STREAMS = {
    "wrapped": lambda: Wrapped(loader()),
    "IterableDataset": lambda: DataLoader(Shuffled(), batch_size=4),
    "generator": minibatches,
    "DataLoader's child": lambda: Moving(NUMBERED, batch_size=4, shuffle=True),
}


def three_epochs_of(make):
    def epochs(worker):
        batches = make()
        for _ in range(3):
            torch.rand(1 + worker.worker_id), random.random(), np.random.rand()
            yield worker.batches(make() if batches is iter(batches) else batches)

    return epochs


@pytest.mark.parametrize(
    ("algorithm", "which"),
    [(one, which) for one in METHODS for which in STREAMS if which == "generator" or one in ("all-reduce", "hogwild")],
)
def test_a_stream_that_draws_is_used_once(algorithm, which):
    seen = seen_by(algorithm, three_epochs_of(STREAMS[which]), workers=3)
    assert [in_epoch(seen, epoch) for epoch in range(3)] == [ALL] * 3
    assert len({str(epoch) for epoch in seen[0]}) == 3, "epochs are shuffled anew"


@pytest.mark.parametrize("algorithm", ["lockstep", "local-sgd(period=3)", "hogwild"])
@pytest.mark.parametrize("which", ["wrapped", "generator"])
def test_threads_read_through_one_iterator(algorithm, which):
    seen = seen_by(algorithm, three_epochs_of(STREAMS[which]), workers=3, start=pl.launch, backend="threads")
    assert [in_epoch(seen, epoch) for epoch in range(3)] == [ALL] * 3


def test_the_user_s_seed_decides_the_order():
    def epochs(worker):
        yield worker.batches(Wrapped(loader()))

    torch.manual_seed(5)
    seen = seen_by("lockstep", epochs)
    torch.manual_seed(5)
    made(lr=0.01)
    plain = [numbers.tolist() for _, numbers in loader()]
    assert [batch for both in zip(seen[0][0], seen[1][0], strict=True) for batch in both] == plain


@pytest.mark.parametrize("algorithm", METHODS)
def test_an_endless_iterator_goes_on_after_a_break(algorithm):
    def epochs(worker):
        endless = ((HELD_OUT[index : index + 1], torch.tensor([index])) for index in range(10**6))
        for _ in range(3):
            yield leaving_after(worker.batches(endless), 5)

    seen = seen_by(algorithm, epochs)
    numbers = [number for one in seen.values() for epoch in one for batch in epoch for number in batch]
    assert len(numbers) == len(set(numbers)) == 30


@pytest.mark.parametrize("algorithm", ["all-reduce", "local-sgd(period=3)"])
def test_a_last_round_of_a_stream_may_be_smaller(algorithm):
    def epochs(worker):
        yield worker.batches((HELD_OUT[index : index + 1], torch.tensor([index])) for index in range(7))

    assert in_epoch(seen_by(algorithm, epochs, workers=3), 0) == list(range(7))


# Data that differ between workers


def shuffled_list():
    items = [(HELD_OUT[index : index + 4], torch.arange(index, index + 4)) for index in range(0, 64, 4)]
    random.shuffle(items)
    return items


class Divided(IterableDataset):
    def __iter__(self):
        return ((HELD_OUT[index], index) for index in range(own_id(), 64, 2))


def divided():
    return TensorDataset(HELD_OUT[own_id() :: 2], torch.arange(64)[own_id() :: 2])


def drawn_by_the_loop():
    return iter([(HELD_OUT[numbers], numbers) for numbers in torch.randperm(64).split(4)])


DIFFERENT = {
    "list shuffled by the loop": (shuffled_list, "different samples"),
    "batches drawn by the loop": (drawn_by_the_loop, "different samples"),
    "divided samples": (lambda: DataLoader(divided(), batch_size=4, shuffle=True), "different samples"),
    "divided stream": (lambda: DataLoader(Divided(), batch_size=4), "different samples"),
    "lengths": (lambda: [(HELD_OUT[:4], torch.arange(4))] * (4 + own_id()), "batches, and another worker's has"),
}


@pytest.mark.parametrize("which", DIFFERENT)
@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild", "ad-psgd"])
def test_different_data_are_refused(algorithm, which):
    make, says = DIFFERENT[which]
    with pytest.raises(pl.UsageError, match=says) as refused:
        seen_by(algorithm, lambda worker: [worker.batches(make())])
    assert "worker.batches(loader, own=True)" in str(refused.value)


@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild"])
def test_each_uses_its_share_of_a_list_that_it_has_drawn(algorithm):
    """As small programs do: random batches, drawn within the `with`."""

    def epochs(worker):
        numbers = [torch.arange(4) + 4 * index for index in range(8 * own_id(), 8 * own_id() + 8)]
        return [worker.batches([(HELD_OUT[one], one) for one in numbers])]

    with pytest.warns(UserWarning, match=r"each worker uses its share.*own=True"):
        seen = seen_by(algorithm, epochs)
    used = [sample for (epoch,) in seen.values() for batch in epoch for sample in batch]
    assert len(used) == len(set(used)) == 32


def test_a_later_epoch_is_compared_too():
    def epochs(worker):
        for epoch in range(2):
            data = Subset(NUMBERED, ALL if not epoch or own_id() else ALL[::-1])
            yield worker.batches(DataLoader(data, batch_size=4))

    with pytest.raises(pl.UsageError, match="different samples"):
        seen_by("lockstep", epochs)


@pytest.mark.parametrize("algorithm", METHODS)
def test_own_data_are_the_worker_s_own(algorithm):
    seen = seen_by(algorithm, lambda worker: [worker.batches(DataLoader(divided(), batch_size=4), own=True)])
    assert [sorted(chain.from_iterable(one[0])) for one in seen.values()] == [list(range(own, 64, 2)) for own in (0, 1)]


@pytest.mark.parametrize("algorithm", METHODS)
@pytest.mark.parametrize("start", [pl.simulate, partial(pl.launch, backend="threads")])
def test_own_data_without_a_length(algorithm, start):
    """Worker 1 has three batches more, in whose rounds worker 0 has its last one again."""

    def epochs(worker):
        for _ in range(2):
            numbers = torch.arange(4 * 5 + 4 * 3 * worker.worker_id)
            yield worker.batches(((HELD_OUT[one], one) for one in numbers.split(4)), own=True)

    seen = seen_by(algorithm, epochs, start=start)
    fewer = 8 if algorithm in METHODS[:3] else 5
    assert {worker: [len(epoch) for epoch in one] for worker, one in seen.items()} == {0: [fewer] * 2, 1: [8, 8]}
    assert [batch == seen[0][0][4] for batch in seen[0][0]] == [False] * 4 + [True] * (fewer - 4)


@pytest.mark.parametrize("has_length", [True, False])
def test_a_worker_without_own_data_is_refused_in_lockstep(has_length):
    def epochs(worker):
        own = [(HELD_OUT[:4], torch.arange(4))] * (2 * own_id())
        yield worker.batches(own if has_length else iter(own), own=True)

    with pytest.raises(pl.UsageError, match=r"loader has no batches, but other workers' have some"):
        seen_by("all-reduce", epochs)


def test_own_data_have_a_length_of_their_own():
    lengths = {}

    def epochs(worker):
        batches = worker.batches([(HELD_OUT[:4], torch.arange(4))] * (4 + own_id()), own=True)
        lengths[own_id()] = len(batches)
        yield batches

    seen = seen_by("all-reduce", epochs)
    assert lengths == {0: 4, 1: 5}
    assert [len(one[0]) for one in seen.values()] == [5, 5]


class Augmented(Dataset):
    """By a generator of its own, which nobody has seeded."""

    def __init__(self):
        self.random = np.random.default_rng()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return HELD_OUT[index] + self.random.normal(), index


def test_what_two_fetches_give_differently_is_not_compared():
    seen = seen_by("lockstep", lambda worker: [worker.batches(DataLoader(Augmented(), batch_size=4))])
    assert in_epoch(seen, 0) == ALL


def test_a_stream_that_is_another_whenever_it_is_read_is_warned_of():
    """Its samples may be other ones, or only their order: nobody can tell."""
    with pytest.warns(UserWarning, match="Wrapped yields different samples each time it is iterated"):
        seen = seen_by("lockstep", lambda worker: [worker.batches(Wrapped(DataLoader(Augmented(), batch_size=4)))])
    assert in_epoch(seen, 0) == ALL


def test_comparing_leaves_the_loop_s_random_numbers_alone():
    class Noisy(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return HELD_OUT[index] + torch.randn(1) + random.random() + np.random.rand(), index

    numbers = {}

    def epochs(worker):
        yield leaving_after(worker.batches(batches := Wrapped(loader())), 1)
        before = torch.get_rng_state(), random.getstate()
        yield leaving_after(worker.batches(batches), 1)
        numbers[own_id()] = torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()

    seen_by("lockstep", epochs)
    assert numbers == {0: True, 1: True}
    assert in_epoch(seen_by("lockstep", lambda worker: [worker.batches(DataLoader(Noisy(), batch_size=4))]), 0) == ALL


# How many samples a batch has


class Pairs(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return HELD_OUT[index], index


def detection(items):
    return tuple(zip(*items, strict=True))


def graph(items):
    return {"edge_index": torch.zeros(2, 5 * len(items)), "x": torch.stack([x for x, _ in items])}


def time_major(items):
    return torch.stack([x for x, _ in items], dim=1), torch.tensor([index for _, index in items])


class Streamed(IterableDataset):
    def __iter__(self):
        return ((HELD_OUT[index], index) for index in range(12))


@pytest.mark.parametrize("collate", [detection, graph, time_major])
@pytest.mark.parametrize(("data", "own"), [(Pairs, False), (Pairs, True), (Streamed, False), (Streamed, True)])
@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild"])
def test_samples_are_those_that_the_loader_knows(algorithm, own, data, collate):
    def loop():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for _ in worker.batches(DataLoader(data(), batch_size=4, collate_fn=collate), own=own):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()

    assert pl.simulate(loop, workers=2, algorithm=algorithm).result["samples"] == 12 * (1 + own)


@pytest.mark.parametrize("algorithm", ["hogwild", "ad-psgd"])
def test_an_asynchronous_worker_gets_no_more_batches_than_the_length(algorithm):
    """One that is ten times as fast gets most of them."""
    lengths = []

    def epochs(worker):
        batches = worker.batches(loader())
        lengths.append(len(batches))
        yield batches

    cluster = pl.Cluster(workers=2).slow(worker=1, factor=10.0)
    seen = seen_by(algorithm, epochs, workers=None, cluster=cluster)
    assert Counter(lengths) == {16: 2}
    assert max(len(one[0]) for one in seen.values()) > 8
