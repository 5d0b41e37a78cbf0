"""Loaders with samplers of their own, with a DistributedSampler left in, and without any length."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import paceline as pl
from chosen import each_value
from loops import families
from loops.coder import HELD_OUT
from loops.test_batches_object import in_epoch, leaving_after, seen_by

DATA = TensorDataset(HELD_OUT, torch.arange(64))


class Drawn(Sampler):
    """Shuffles with a generator of somebody's choice."""

    def __init__(self, shuffled):
        self.shuffled = shuffled

    def __iter__(self):
        return iter(self.shuffled(list(range(64))))

    def __len__(self):
        return 64


class Epochs(Sampler):
    """As DistributedSampler: its order depends on the epoch that it has been told."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Pairs(BatchSampler):
    """Two and two, in an order that it draws itself."""

    def __init__(self):
        pass

    def __iter__(self):
        for pair in torch.randperm(32).tolist():
            yield [2 * pair, 2 * pair + 1]

    def __len__(self):
        return 32


def sampled(sampler):
    return lambda: DataLoader(DATA, batch_size=4, sampler=sampler())


def python_s(indices):
    return random.sample(indices, 64)


def numpy_s(indices):
    return np.random.permutation(indices)


LOADERS = {
    "Python's generator": sampled(lambda: Drawn(python_s)),
    "NumPy's generator": sampled(lambda: Drawn(numpy_s)),
    "torch's generator": sampled(lambda: Drawn(lambda indices: torch.randperm(64))),
    "own seed": sampled(lambda: Drawn(_own(random.Random(3)))),
    "told epochs": sampled(Epochs),
    "subset": sampled(lambda: SubsetRandomSampler(range(64))),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=Pairs()),
    "batches of a sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(Drawn(python_s), 4, False)),
    "single samples": lambda: DataLoader(DATA, batch_size=None, sampler=BatchSampler(RandomSampler(DATA), 4, False)),
}


def _own(generator):
    return lambda indices: generator.sample(indices, 64)


@pytest.mark.parametrize(
    ("which", "algorithm"),
    each_value(list(LOADERS), ["all-reduce", "local-sgd(period=3)", "leashed", "ad-psgd", "parameter-server"]),
)
def test_every_worker_takes_its_part_of_what_the_sampler_draws(algorithm, which):
    def epochs(worker):
        loader = LOADERS[which]()
        for epoch in range(2):
            if which == "told epochs":
                loader.sampler.set_epoch(epoch)
            yield worker.batches(loader)

    seen = seen_by(algorithm, epochs)
    assert in_epoch(seen, 0) == in_epoch(seen, 1) == list(range(64))
    assert seen[0][0] != seen[0][1]
    if which == "batch sampler":
        assert all(b == a + 1 for one in seen.values() for epoch in one for a, b in epoch)


@pytest.mark.parametrize("generator", [None, 5])
@pytest.mark.parametrize("algorithm", families.KINDS)
def test_weights_are_those_of_the_sampler(algorithm, generator):
    """Half of the samples weigh nothing."""
    weights = [float(index % 2) for index in range(64)]

    def epochs(worker):
        own = torch.Generator().manual_seed(generator) if generator else None
        sampler = WeightedRandomSampler(weights, 40, generator=own)
        for _ in range(2):
            yield worker.batches(DataLoader(DATA, batch_size=4, sampler=sampler))

    seen = seen_by(algorithm, epochs, workers=3)
    for epoch in range(2):
        assert len(in_epoch(seen, epoch)) == 40
        assert all(number % 2 for number in in_epoch(seen, epoch))
    assert in_epoch(seen, 0) != in_epoch(seen, 1)


@pytest.mark.parametrize("algorithm", ["lockstep", "hogwild"])
def test_a_random_sampler_that_draws_with_replacement(algorithm):
    def epochs(worker):
        yield worker.batches(DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, True, 200)))

    assert len(in_epoch(seen_by(algorithm, epochs), 0)) == 200


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield from torch.randperm(64).tolist()


@pytest.mark.parametrize("algorithm", families.KINDS)
def test_a_sampler_that_never_ends(algorithm):
    def epochs(worker):
        batches = worker.batches(DataLoader(DATA, batch_size=4, sampler=Endless()))
        for _ in range(2):
            yield leaving_after(batches, 40)

    seen = seen_by(algorithm, epochs)
    for epoch in range(2):
        numbers = in_epoch(seen, epoch)
        assert len(numbers) == 320
        assert all(numbers.count(one) == 5 for one in range(64)), "five times round, shared by two"


@pytest.mark.parametrize("algorithm", ["hogwild", "lockstep"])
def test_drawing_leaves_the_loop_s_own_random_numbers_alone(algorithm):
    drawn = []

    def epochs(worker):
        torch.manual_seed(7)
        yield worker.batches(sampled(lambda: Drawn(lambda indices: torch.randperm(64)))())
        drawn.append(torch.rand(1).item())

    seen_by(algorithm, epochs)
    torch.manual_seed(7)
    assert drawn == [torch.rand(1).item()] * 2


@pytest.mark.parametrize("algorithm", ["hogwild", "lockstep", "ad-psgd"])
def test_a_sampler_that_draws_something_else_on_each_worker_is_named(algorithm):
    def epochs(worker):
        loader = sampled(lambda: Drawn(_own(random.Random())))()
        yield worker.batches(DataLoader(DATA, batch_sampler=BatchSampler(loader.sampler, 4, False)))

    for start, more in ((pl.simulate, {}), (pl.launch, {"backend": "threads"})):
        with pytest.raises(pl.UsageError, match="BatchSampler of Drawn shuffles differently on each worker"):
            seen_by(algorithm, epochs, start=start, **more)


@pytest.mark.parametrize("algorithm", families.KINDS)
def test_a_distributed_sampler_that_was_left_in(algorithm):
    def epochs(worker):
        sampler = DistributedSampler(DATA, num_replicas=2, rank=worker.worker_id, shuffle=True)
        with pytest.warns(UserWarning, match=r"DistributedSampler was ignored"):
            yield worker.batches(DataLoader(DATA, batch_size=4, sampler=sampler))

    seen = seen_by(algorithm, epochs)
    assert in_epoch(seen, 0) == list(range(64))


class Parts(Sampler):
    """A sampler for distributed training that PyTorch does not know."""

    def __init__(self, rank):
        self.num_replicas, self.rank = 2, rank

    def __iter__(self):
        return iter(range(self.rank, 64, 2))

    def __len__(self):
        return 32


REFUSED = {
    "Both Parts and worker.batches divide the data": lambda rank: DataLoader(DATA, batch_size=4, sampler=Parts(rank)),
}


@pytest.mark.parametrize("says", REFUSED)
@pytest.mark.parametrize("algorithm", ["hogwild", "lockstep"])
def test_what_cannot_be_shared_is_named(algorithm, says):
    with pytest.raises(pl.UsageError, match=says):
        seen_by(algorithm, lambda worker: [worker.batches(REFUSED[says](worker.worker_id))])


class Stream(IterableDataset):
    def __iter__(self):
        return ((HELD_OUT[index], index) for index in range(64))


@pytest.mark.parametrize("algorithm", families.ALL)
def test_a_stream_is_shared(algorithm):
    def epochs(worker):
        batches = worker.batches(DataLoader(Stream(), batch_size=4))
        with pytest.raises(TypeError):
            len(batches)
        yield batches
        yield batches

    seen = seen_by(algorithm, epochs, workers=3)
    assert in_epoch(seen, 0) == in_epoch(seen, 1) == list(range(64))


def test_a_stream_goes_on_where_a_run_was_stopped(tmp_path):
    """Each worker has had every batch that it took: none twice."""

    def epochs(worker):
        yield worker.batches(DataLoader(Stream(), batch_size=4))

    first = seen_by("hogwild", epochs, start=pl.launch, backend="threads", limit_samples=24, out=tmp_path / "run")
    again = seen_by("hogwild", epochs, start=pl.launch, backend="threads", resume=tmp_path / "run")
    numbers = in_epoch(first, 0) + in_epoch(again, 0)
    assert len(set(numbers)) == len(numbers) >= 56
