"""A loader's own processes fetch what a worker has claimed: all of its settings mean what they mean alone."""

import itertools
import multiprocessing
import os
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, get_worker_info

from data.test_claims import in_shared_memory
from loops.coder import HELD_OUT
from paceline.data.claims import WorkerClaims
from paceline.data.epoch_claims import LocalEpochClaims
from paceline.data.loader_batches import shared_batches
from paceline.data.loader_processes import LoaderProcesses
from paceline.data.sources import ABSENT

BEGUN = multiprocessing.get_context("fork").Value("i", 0)


class Numbered(Dataset):
    """A sample, its number, and which process of a loader has fetched it."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        info = get_worker_info()
        return HELD_OUT[index], index, -1 if info is None else os.getpid()


def custom(samples):
    xs, numbers, processes = zip(*samples, strict=True)
    return torch.stack(xs), list(numbers), set(processes)


def begin(worker_id):
    with BEGUN.get_lock():
        BEGUN.value += 1


def loader(**settings):
    settings = {"batch_size": 4, "shuffle": True, "num_workers": 2, "collate_fn": custom} | settings
    return DataLoader(Numbered(), **settings)


def claims_of(one, counts, worker_id=0, num_workers=2, *, lockstep=False):
    batches = shared_batches(one, 0)
    return WorkerClaims(batches, worker_id=worker_id, num_workers=num_workers, lockstep=lockstep, counts=counts)


class Worker:
    """One worker's epochs, without a training."""

    def __init__(self, counts, worker_id=0, of=2, *, lockstep=False, **settings):
        one = loader(**settings)
        self.claims = claims_of(one, counts, worker_id, of, lockstep=lockstep)
        self.processes = LoaderProcesses(one, of)

    def epoch(self, number, stopped=lambda: False):
        self.claims.begin(number)
        for batch, fetch in self.processes.epoch(self.claims, stopped):
            self.claims.hand_out(batch)
            yield batch, (fetch() if batch != ABSENT else None)


def numbers(batches):
    return sorted(number for _, batch in batches if batch is not None for number in batch[1])


@pytest.fixture(params=[in_shared_memory, LocalEpochClaims])
def counts(request):
    return request.param()


@pytest.mark.parametrize("persistent", [False, True])
def test_two_workers_share_an_epoch(counts, persistent):
    both = [Worker(counts, worker, persistent_workers=persistent) for worker in range(2)]
    for epoch in range(2):
        given = [[], []]
        sources = [one.epoch(epoch) for one in both]
        while sources:  # in turn, as equally fast workers do
            for source in list(sources):
                batch = next(source, None)
                if batch is None:
                    sources.remove(source)
                else:
                    given[0 if source.gi_frame.f_locals["self"] is both[0] else 1].append(batch)
        assert numbers(given[0] + given[1]) == list(range(64))
        assert min(len(given[0]), len(given[1])) >= 6, "near the end, none claims much ahead"
        assert all(-1 not in processes for _, (_, _, processes) in given[0] + given[1])


def ahead_at_the_end(num_workers, *, left):
    """Batches that a worker has claimed ahead of its loop, when it has been handed all others of an epoch."""
    worker = Worker(LocalEpochClaims(), 0, num_workers, prefetch_factor=4)
    source = worker.epoch(0)
    for _ in range(16 - left):
        next(source)
    source.close()
    return worker.claims.num_claimed - worker.claims.taken


def test_a_worker_without_others_claims_ahead_to_the_end():
    assert [ahead_at_the_end(1, left=left) for left in (8, 3, 2, 1)] == [8, 3, 2, 1]


@pytest.mark.parametrize(("waiting_s", "training_s", "ahead"), [(1.0, 0.0, 2), (1.0, 4.0, 1)])
def test_of_several_each_claims_at_the_end_what_the_loop_waits_for(waiting_s, training_s, ahead, monkeypatch):
    """The clock is read before and after each batch: the loop waits in between, and trains afterwards."""
    spent = itertools.cycle([waiting_s, training_s])
    at = itertools.accumulate(itertools.chain([0.0], spent))
    monkeypatch.setattr("paceline.data.loader_processes._now_s", partial(next, at))
    assert ahead_at_the_end(2, left=3) == ahead


@pytest.mark.parametrize("settings", [{}, {"prefetch_factor": 5}, {"num_workers": 1}])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_lockstep_deals_rounds(settings, num_workers):
    counts = LocalEpochClaims()
    whole = []
    for worker in range(num_workers):
        one = Worker(counts, worker, num_workers, lockstep=True, **settings)
        given = list(one.epoch(0))
        assert len(given) == -(-16 // num_workers)
        assert all(batch == ABSENT or batch % num_workers == worker for batch, _ in given)
        whole += given
    assert numbers(whole) == list(range(64))


def test_a_worker_that_leaves_an_epoch_gives_back_what_it_had_claimed_ahead():
    counts = in_shared_memory()
    one, other = Worker(counts, 0), Worker(counts, 1)
    source = one.epoch(0)
    taken = [next(source), next(source)]
    source.close()
    assert numbers(taken + list(other.epoch(0))) == list(range(64))
    assert counts.least_kept() is None


def test_a_stopped_run_knows_what_was_claimed_and_not_handed_out():
    counts = in_shared_memory()
    source = Worker(counts).epoch(0, stopped=lambda: True)
    next(source)
    source.close()
    assert counts.least_kept() == 1


def test_what_a_dead_worker_had_claimed_is_taken_by_the_others():
    counts = in_shared_memory()
    dead, other = Worker(counts, 0), Worker(counts, 1)
    source = dead.epoch(0)
    taken = [next(source)]
    counts.release(0, None, is_left=False)  # as the supervisor does
    assert numbers(taken + list(other.epoch(0))) == list(range(64))
    dead.claims.give_back = lambda *_, **__: None
    source.close()


def test_other_settings():
    one = loader(sampler=WeightedRandomSampler([1.0] * 32 + [0.0] * 32, 20), shuffle=None, worker_init_fn=begin)
    claims = claims_of(one, LocalEpochClaims())
    processes = LoaderProcesses(one, 1)
    before = BEGUN.value
    claims.begin(0)
    given = [(number, fetch()) for number, fetch in processes.epoch(claims, lambda: False)]
    assert len(numbers(given)) == 20
    assert max(numbers(given)) < 32
    assert BEGUN.value == before + 2


def test_single_samples():
    one = DataLoader(Numbered(), batch_size=None, num_workers=1)
    claims = claims_of(one, LocalEpochClaims())
    claims.begin(0)
    given = [fetch()[1] for _, fetch in LoaderProcesses(one, 1).epoch(claims, lambda: False)]
    assert sorted(given) == list(range(64))
