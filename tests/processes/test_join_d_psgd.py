"""Workers of D-PSGD that join a run go on without those that are killed or leave."""

import os
import random
import signal

import pytest
import torch

import leftovers
import soak_results
from chosen import soaked
from oracles import gossip
from paceline.transport.message_views import MessageViews
from processes.gossip_reference import GossipReference, GossipSurvivors, mean_of, square
from processes.local_reference import Training, lives_of
from processes.survivors import samples
from processes.test_join_rounds import Crew

WORKERS = 4


def program(folder, kills=None, topology="ring", **options):
    options = {"num_batches": 20, "algorithm": f"d-psgd(topology={topology})"} | options
    return GossipSurvivors(folder, kills or {}, views=MessageViews, **options)


def check(crew, workers=WORKERS, neighbours=gossip.ring, *, breaks=False, **options):
    """Survivors end with the mean of their models, as one process would have trained these; each sample counts once an epoch.

    A worker that dies in the last rounds takes its batches with it.
    """
    first, loop = crew.survivors(workers, **options), crew.program
    dead = {*loop.kills, *crew.gone()} if not crew.replacements else set()
    notes, (steps, _) = loop.notes(workers, {*loop.kills, *crew.gone()}), lives_of(loop, workers)
    reference = GossipReference(Training.of(loop), steps, notes, neighbours, loop.repeats(workers))
    for one, other in zip(first.values(), mean_of(reference.train()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert breaks or {j for *_, j in notes.missing} <= {*loop.kills, *crew.gone()}
    counted = reference.counted(dead)
    assert max(counted.values()) == loop.epochs
    missed = loop.epochs * len(samples(loop.num_batches)[0]) - counted.total()
    assert missed == 0 or dead & {*notes.members[max(notes.members)]}
    return notes


@pytest.mark.parametrize(
    "kills",
    [{}, {0: 2, 2: 2}, {0: 2, 1: 2, 3: 3}, *soaked({0: 1}, {0: 1, 1: 3}, {1: 0}, {2: 5})],
    ids=["no deaths", "opposite ones", "all but one", "worker 0", "one after the other", "first step", "at the end"],
)
def test_whoever_dies_whenever(kills, tmp_path):
    """`test_d_psgd_survivors.py` has the other deaths on one machine, and `test_message_views.py` deaths at any message."""
    notes = check(Crew(program(tmp_path, kills)))
    assert len(notes.members[max(notes.members)]) == WORKERS - len(kills)


@pytest.mark.parametrize("at", ["backward", "step"])
def test_dies_within_a_step(at, tmp_path):
    check(Crew(program(tmp_path, {1: 2}, at=at)))


@pytest.mark.parametrize(
    ("topology", "neighbours", "workers"),
    [
        ("exponential", gossip.exponential, 5),
        ("torus", square, 4),
        ("ring", gossip.ring, 2),
        *soaked(("complete", gossip.complete, 4), ("one-peer-exponential", gossip.one_peer, 4)),
    ],
)
def test_topologies(topology, neighbours, workers, tmp_path):
    check(Crew(program(tmp_path, {1: 2}, topology)), workers, neighbours)


@pytest.mark.parametrize(
    "options",
    [
        {"data": "list"},
        {"sums": True},
        {"ahead": True},
        {"num_batches": 5, "epochs": 6},
        *soaked({"optimizer": "adam", "clips": True}, {"data": "processes"}, {"data": "drawn"}, {"scales": True}),
    ],
    ids=str,
)
def test_with(options, tmp_path):
    """What shows in messages. `test_d_psgd_survivors.py` has all of these, and `test_join_rounds.py` most of them."""
    check(Crew(program(tmp_path, {0: 2}, **options)))


@pytest.mark.parametrize("worker", [0, 1])
def test_a_replacement_takes_the_dead_workers_place(worker, tmp_path):
    loop = program(tmp_path, {worker: 2}, optimizer="adam", newcomers={4: {worker: 1}}, num_batches=30)
    notes = check(Crew(loop, replacements=1))
    (round, _), *_ = notes.came[worker]
    assert len(notes.members[round]) == WORKERS > len(notes.members[round - 1])


@pytest.mark.parametrize(
    ("topology", "neighbours", "workers"), [("one-peer-exponential", gossip.one_peer, 4), ("ring", gossip.ring, 2)]
)
def test_a_replacement_in(topology, neighbours, workers, tmp_path):
    loop = program(tmp_path, {1: 2}, topology, newcomers={4: {1: 1}}, num_batches=30, sums=True)
    check(Crew(loop, replacements=1), workers, neighbours)


def test_replacements_of_replacements(tmp_path):
    kills, newcomers = {1: [2, 3], 0: 8}, {4: {1: 1}, 16: {1: 2}, 18: {0: 1}}
    check(Crew(program(tmp_path, kills, newcomers=newcomers, num_batches=80), replacements=3))


@pytest.mark.parametrize("at", ["newcomer yes", "newcomer state"])
def test_a_worker_that_dies_as_it_gives_its_state_is_replaced_like_the_one_that_waits_for_it(at, tmp_path):
    kills, newcomers = {1: 2, 0: -1}, {4: {1: 1}, 14: {0: 1, 1: 2}}
    loop = program(tmp_path, kills, newcomers=newcomers, num_batches=80)
    check(Crew(loop, fatal={0: at}, replacements=3, num_not_let_in=1))


@pytest.mark.parametrize("number", [2, 8, 12, 15, *soaked(1, 5, 11)])
def test_is_killed_before_a_message(number, tmp_path):
    """In a round a worker sends two models; after an epoch's five rounds, it meets the others."""
    check(Crew(program(tmp_path), {number % WORKERS: (number, signal.SIGKILL)}))


@pytest.mark.parametrize("number", [5, 9, 14])
def test_two_are_killed_within_a_meeting(number, tmp_path):
    """One in a round, and another one by a message of the meeting for which that death is the reason."""
    check(Crew(program(tmp_path, {0: 2}), {1: (number, signal.SIGKILL)}))


@pytest.mark.parametrize("number", [1, 6, 12])
def test_a_worker_that_is_told_to_end_makes_its_step_and_leaves(number, tmp_path):
    check(Crew(program(tmp_path), {number % WORKERS: (number, signal.SIGTERM)}))


@pytest.mark.parametrize("number", [2, 7])
def test_a_worker_that_stands_still_is_waited_for(number, tmp_path):
    """Until its neighbours cannot reach it any more: once it goes on, all meet, and do without the models that were lost."""

    def wake(processes):
        leftovers.wait_until(lambda: len(list(tmp_path.glob("misses-*"))) == WORKERS - 1, "the others miss it")
        for one in processes:
            os.kill(one.pid, signal.SIGCONT)

    check(Crew(program(tmp_path), {1: (number, signal.SIGSTOP)}, 0.5), breaks=True, meanwhile=wake)


@pytest.mark.parametrize("number", [1, 7, 13, *soaked(4, 10)])
def test_dies_as_the_models_are_averaged(number, tmp_path):
    """The mean is of the models that are there, and all that are left have the same one."""
    Crew(program(tmp_path), {0: (number, signal.SIGKILL)}, at_end=True).survivors(WORKERS)


def test_a_loop_that_ends_with_an_error_ends_the_others(tmp_path):
    """They do not go on silently without it."""
    assert Crew(program(tmp_path, fails={1: 2})).run(WORKERS) == [1] * WORKERS
    own, *others = sorted(path.read_text() for path in tmp_path.glob("error-*"))
    assert own == "'label 17'"
    assert len(others) == WORKERS - 1
    assert all("had left its loop, by an error (see its output)" in one for one in others)


@pytest.mark.soak
def test_a_hundred_runs_in_which_workers_die_and_leave(tmp_path):
    """Writes what became of them to PACELINE_SOAK_RESULTS."""
    deaths = leaves = 0
    for number in range(100):
        draws, folder = random.Random(f"joined gossip {number}"), tmp_path / str(number)
        folder.mkdir()
        workers = draws.randint(2, 5)
        victims = draws.sample(range(workers), draws.randint(1, workers - 1))
        signals = {
            one: (draws.randrange(1, 60), draws.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            for one in victims
        }
        topology = draws.choice(["ring", "complete", "exponential"])
        options = {"optimizer": draws.choice(["sgd", "adam"]), "sums": draws.random() < 0.3}
        crew = Crew(program(folder, topology=topology, **options), signals)
        check(crew, workers, getattr(gossip, topology))
        ends = list(crew.gone().values())
        deaths, leaves = deaths + ends.count(signal.SIGKILL), leaves + ends.count(signal.SIGTERM)
    soak_results.keep("soak_join_d_psgd", "d-psgd", {"runs": 100, "deaths": deaths, "left": leaves})
