"""`worker.batches(loader)` is an object, as a loader is: it has a length, is iterated again and again, and may be left."""

from collections import UserDict
from collections.abc import Mapping

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import paceline as pl
from loops import families
from loops.coder import HELD_OUT, loss_of, made, own_id

LOCKSTEP = families.SHARED_LOCKSTEP + families.OWN_LOCKSTEP
ASYNCHRONOUS = families.ASYNCHRONOUS + families.SERVED
NUMBERED = TensorDataset(HELD_OUT, torch.arange(64))


def loader():
    return DataLoader(NUMBERED, batch_size=4, shuffle=True)


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()


def seen_by(algorithm, epochs, workers=2, start=pl.simulate, **more):
    """Which samples each worker has had in each epoch: `epochs(worker)` yields them as iterables of batches."""
    seen = {}

    def loop():
        model, optimizer = made(lr=0.01)
        seen[own_id()] = mine = []
        with pl.attach(model, optimizer) as worker:
            for batches in epochs(worker):
                mine.append([])
                for x, numbers in batches:
                    step(model, optimizer, x)
                    mine[-1].append(numbers.tolist())

    start(loop, workers=workers, algorithm=algorithm, **more)
    return seen


def in_epoch(seen, epoch):
    """The samples of all workers; a worker's last batch may have come again in the last round, where it has no other."""
    once = [one[epoch][: -1 if one[epoch][-1:] == one[epoch][-2:-1] else None] for one in seen.values()]
    return sorted(number for one in once for batch in one for number in batch)


@pytest.mark.parametrize("batched", [lambda xs: xs, lambda xs: DataLoader(xs, batch_size=2)], ids=["list", "loader"])
@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild"])
def test_data_that_grow_between_two_epochs_are_refused(algorithm, batched):
    """Plain PyTorch would train on the new samples, too."""

    def loop():
        model, optimizer = made()
        xs = list(HELD_OUT[:12])
        data = batched(xs)
        with pl.attach(model, optimizer) as worker:
            for _ in range(2):
                for x in worker.batches(data):
                    step(model, optimizer, x)
                xs.append(xs[0])

    with pytest.raises(pl.UsageError, match=r"list .* had 12 elements and now has 13.* a sampler of your own"):
        pl.simulate(loop, workers=2, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", families.KINDS)
def test_an_evaluation_is_refused(algorithm):
    """Its samples would count as those of the next step. Loaders of other sizes are refused as they begin."""
    drawn = DataLoader(NUMBERED, batch_size=4, sampler=WeightedRandomSampler(torch.ones(64), 32))

    def loop():
        model, optimizer = made(lr=0.01)
        with pl.attach(model, optimizer) as worker:
            for x, _ in worker.batches(drawn):
                step(model, optimizer, x)
            with torch.no_grad():
                for x, _ in worker.batches(drawn):
                    loss_of(model, x)

    with pytest.raises(pl.UsageError, match="as in an evaluation"):
        pl.simulate(loop, workers=2, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", families.KINDS)
def test_hoisted_out_of_the_epoch_loop(algorithm):
    def epochs(worker):
        batches = worker.batches(loader())
        for _ in range(3):
            yield batches

    seen = seen_by(algorithm, epochs)
    for epoch in range(3):
        assert in_epoch(seen, epoch) == list(range(64))
    assert seen[0][0] != seen[0][1], "epochs are shuffled anew"


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("algorithm", LOCKSTEP)
def test_its_length_is_exact_in_lockstep(algorithm, workers):
    lengths = {}

    def epochs(worker):
        batches = worker.batches(loader())
        lengths[own_id()] = len(batches)
        yield batches

    seen = seen_by(algorithm, epochs, workers)
    assert (
        {worker: len(one[0]) for worker, one in seen.items()}
        == lengths
        == dict.fromkeys(range(workers), -(-16 // workers))
    )
    assert in_epoch(seen, 0) == list(range(64))


@pytest.mark.parametrize("algorithm", ASYNCHRONOUS)
def test_its_length_is_the_most_that_a_worker_can_get(algorithm):
    lengths = []

    def epochs(worker):
        lengths.append(len(worker.batches(loader())))
        yield worker.batches(loader())

    seen_by(algorithm, epochs, workers=3)
    assert lengths == [16, 16, 16]


def test_alone_it_has_the_loader_s_length():
    model, optimizer = made()
    with pl.attach(model, optimizer) as worker:
        batches = worker.batches(loader())
        assert len(batches) == len(list(batches)) == 16
        assert batches.dataset is NUMBERED
        with pytest.raises(TypeError):
            len(worker.batches(iter([])))


def leaving_after(batches, number):
    for index, batch in enumerate(batches, start=1):
        yield batch
        if index == number:
            break


@pytest.mark.parametrize(
    ("algorithm", "hoisted"), [(one, True) for one in families.ALL] + [(one, False) for one in families.KINDS]
)
def test_after_a_break_comes_the_next_epoch(algorithm, hoisted):
    """The third one had what was left of all: [10, 10, 130]."""

    def epochs(worker):
        batches = worker.batches(loader())
        for _ in range(2):
            yield leaving_after(batches if hoisted else worker.batches(loader()), 5)
        yield batches if hoisted else worker.batches(loader())

    seen = seen_by(algorithm, epochs)
    for one in seen.values():
        assert [len(epoch) for epoch in one[:2]] == [5, 5]
    for epoch in range(2):
        numbers = in_epoch(seen, epoch)
        assert len(set(numbers)) == len(numbers) == 40
    assert in_epoch(seen, 2) == list(range(64))


@pytest.mark.parametrize("algorithm", ASYNCHRONOUS)
def test_a_worker_that_leaves_an_epoch_early_leaves_it_to_the_others(algorithm):
    def epochs(worker):
        for _ in range(2):
            yield leaving_after(worker.batches(loader()), 2) if own_id() == 0 else worker.batches(loader())

    seen = seen_by(algorithm, epochs)
    assert in_epoch(seen, 0) == in_epoch(seen, 1) == list(range(64))
    assert [len(epoch) for epoch in seen[0]] == [2, 2]


@pytest.mark.parametrize("algorithm", ["hogwild", "ad-psgd", "lockstep", "parameter-server(mode=async)"])
def test_real_workers(algorithm):
    def epochs(worker):
        batches = worker.batches(loader())
        yield leaving_after(batches, 3)
        yield batches
        yield batches

    seen = seen_by(algorithm, epochs, start=pl.launch, backend="threads")
    assert len(in_epoch(seen, 0)) == 24
    assert in_epoch(seen, 1) == in_epoch(seen, 2) == list(range(64))


@pytest.mark.parametrize("algorithm", ["lockstep", "hogwild"])
def test_the_idiom_of_one_batch_at_a_time(algorithm):
    """Every `next(iter(...))` is the first batch of a new epoch, as with a loader."""

    def epochs(worker):
        batches = worker.batches(loader())
        for _ in range(80):
            yield [next(iter(batches))]

    seen = seen_by(algorithm, epochs)
    assert [len(one) for one in seen.values()] == [80, 80]
    firsts = {tuple(epoch[0]) for one in seen.values() for epoch in one}
    assert len(firsts) > 60


@pytest.mark.parametrize("start", [pl.simulate, pl.launch])
@pytest.mark.parametrize(
    ("empty", "says"),
    [
        ([], "an empty list, so there is nothing to train on"),
        (DataLoader(TensorDataset(torch.zeros(0, 6))), "a DataLoader of an empty data set"),
        (DataLoader(TensorDataset(torch.zeros(3, 6)), batch_size=4, drop_last=True), "lower batch_size"),
    ],
)
def test_nothing_to_train_on(empty, says, start):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for _ in worker.batches(empty):
                raise AssertionError

    more = {"backend": "threads"} if start is pl.launch else {}
    with pytest.raises(pl.UsageError, match=says):
        start(loop, workers=2, algorithm="hogwild", **more)


@pytest.mark.parametrize("algorithm", ["all-reduce", "local-sgd(period=3)", "hogwild", "parameter-server(mode=async)"])
def test_two_iterations_at_once_are_refused(algorithm):
    """As loops over labelled and other data have them: each would be an epoch of the run, and cut the other short."""

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for (x, _), (more, _) in zip(worker.batches(loader()), worker.batches(loader()), strict=True):
                step(model, optimizer, torch.cat([x, more]))

    with pytest.raises(pl.UsageError, match="iterate the other loader itself"):
        pl.simulate(loop, workers=2, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild"])
def test_one_of_two_loaders_may_be_the_worker_s_own(algorithm):
    def epochs(worker):
        for _ in range(2):
            yield (batch for batch, _ in zip(worker.batches(loader()), loader(), strict=False))

    seen = seen_by(algorithm, epochs)
    for epoch in range(2):
        assert in_epoch(seen, epoch) == list(range(64))


def test_alone_two_iterations_draw_as_the_loaders_themselves_do():
    def orders(batches):
        torch.manual_seed(3)
        pairs = zip(batches(loader()), batches(loader()), strict=True)
        return [(a.tolist(), b.tolist()) for (_, a), (_, b) in pairs]

    model, optimizer = made()
    with pl.attach(model, optimizer) as worker:
        ours = orders(worker.batches)
        step(model, optimizer, HELD_OUT)
    assert ours == orders(iter)


class Graphs:
    """A batch of a class of one's own, of which nobody knows how many samples it has."""

    def __init__(self, samples):
        self.x = torch.stack([x for x, _ in samples])


@pytest.mark.parametrize(
    "collate",
    [
        Graphs,
        lambda samples: {"names": [str(n) for _, n in samples], "x": torch.stack([x for x, _ in samples])},
        lambda samples: UserDict(names=("a",), x=torch.stack([x for x, _ in samples])),
    ],
    ids=["an object", "names first", "another mapping"],
)
@pytest.mark.parametrize("algorithm", ["lockstep", "ad-psgd"])
def test_samples_are_counted_whatever_a_batch_is(algorithm, collate):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for batch in worker.batches(DataLoader(NUMBERED, batch_size=4, collate_fn=collate)):
                step(model, optimizer, batch["x"] if isinstance(batch, Mapping) else batch.x)

    assert pl.simulate(loop, workers=2, algorithm=algorithm).result["samples"] == 64


def one_ahead(batches):
    """As loaders that bring the next batch to a device while the present one is computed with."""
    batches = iter(batches)
    following = next(batches, None)
    while following is not None:
        present, following = following, next(batches, None)
        yield present


@pytest.mark.parametrize("algorithm", LOCKSTEP)
def test_a_loop_that_fetches_one_batch_ahead_loses_no_gradient(algorithm):
    """Of 16 batches a worker of three has five, and fetches the sixth round's, which is none, before its last step."""

    def loop():
        model, optimizer = made(lr=0.01)
        with pl.attach(model, optimizer) as worker:
            for _ in range(2):
                for x, _ in one_ahead(worker.batches(loader())):
                    step(model, optimizer, x)

    run = pl.simulate(loop, workers=3, algorithm=algorithm)
    for rows in run.records.values():
        with_gradient = rows[rows["samples"] > 0]
        assert len(with_gradient) == (12 if rows is run.records[0] else 10)
        assert (with_gradient["samples"] % 4 == 0).all()
