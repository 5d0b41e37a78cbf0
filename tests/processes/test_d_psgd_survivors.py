"""Workers of D-PSGD go on without those that are killed, on one machine."""

import random
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

import leftovers
import paceline as pl
import rounds
import soak_results
from oracles import gossip
from paceline.memory.failpoints import ENVIRONMENT_VARIABLE
from processes.gossip_reference import GossipReference, GossipSurvivors, mean_of, square
from processes.local_reference import Training, steps_in, steps_of
from processes.survivors import samples
from rounds import run_task, task_file

WORKERS = 4


def check(program, workers=WORKERS, topology="ring", neighbours=gossip.ring, **options):
    """Survivors end with the mean of their models, as one process would have trained these; each sample counts once an epoch.

    A worker that dies in the last rounds takes its batches with it.
    """
    program = replace(program, algorithm=f"d-psgd(topology={topology})")
    run = pl.launch(program, workers=workers, **options)
    dead = run.result["workers_lost"]
    notes, steps = program.notes(workers), steps_of(program.folder, workers)
    reference = GossipReference(Training.of(program), steps, notes, neighbours, program.repeats(workers))
    expected = mean_of(reference.train())
    for own in program.models([one for one in range(workers) if one not in dead]):
        for one, other in zip(own.values(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert {j for *_, j in notes.missing} <= set(dead)
    counted = reference.counted(dead)
    assert max(counted.values()) == program.epochs
    missed = program.epochs * len(samples(program.num_batches)[0]) - counted.total()
    assert missed == 0 or {*dead} & {*notes.members[max(notes.members)]}
    return run, notes


@pytest.mark.parametrize(
    "kills",
    [{}, {0: 1}, {0: 2, 2: 2}, {0: 1, 1: 3}, {1: 0}, {2: 5}, {0: 2, 1: 2, 3: 3}],
    ids=["no deaths", "worker 0", "opposite ones", "one after the other", "first step", "at the end", "all but one"],
)
def test_whoever_dies_whenever(kills, tmp_path):
    run, notes = check(GossipSurvivors(tmp_path, kills, num_batches=20))
    assert sorted(run.result["workers_lost"]) == sorted(kills)
    assert len(notes.members[max(notes.members)]) == WORKERS - len(kills)


@pytest.mark.parametrize(
    ("topology", "neighbours", "workers"),
    [("complete", gossip.complete, 4), ("exponential", gossip.exponential, 5), ("torus", square, 4)],
)
def test_topologies(topology, neighbours, workers, tmp_path):
    check(GossipSurvivors(tmp_path, {1: 2}, num_batches=20), workers, topology, neighbours)


@pytest.mark.parametrize("point", ["views.begun@1#3", "replicated.mid_write@1#3"])
def test_dies_between_a_rounds_operations(point, tmp_path, monkeypatch):
    """Once it has begun a round, before it has sent its model; and while it averages."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, point)
    run, notes = check(GossipSurvivors(tmp_path, num_batches=20))
    assert run.result["workers_lost"] == [1]
    if point.startswith("views"):
        assert {(0, 2, 1), (2, 2, 1)} <= notes.missing


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam", "clips": True},
        {"data": "processes"},
        {"data": "drawn"},
        {"data": "list"},
        {"sums": True},
        {"ahead": True},
        {"scales": True},
        {"num_batches": 5, "epochs": 6},
        {"per_step": 2, "num_batches": 48, "marks": True},
        {"per_step": 2, "num_batches": 48, "data": "processes"},
    ],
    ids=str,
)
def test_with(options, tmp_path):
    check(GossipSurvivors(tmp_path, {0: 2}, **{"num_batches": 20} | options))


def test_a_task_goes_on(tmp_path, monkeypatch):
    """Its worker dies while it averages for the second time, after it has sent the model with its first step."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "replicated.mid_write@1#2")
    name = task_file(tmp_path, 17)
    run, _ = run_task("d-psgd", "momentum", name, WORKERS, "processes", out=tmp_path / "run")
    assert run.result["workers_lost"] == [1]
    assert run.result["torn_updates"] == 1
    batches = Counter(n for own in steps_in(run.records) for step in own for batch in step for n in batch)
    assert batches == dict.fromkeys(range(rounds.EPOCHS * 17), 1)


def test_a_run_that_has_lost_a_worker_is_resumed_with_a_successor(tmp_path):
    """Which begins with the first survivor's model."""
    folder, program = tmp_path / "run", GossipSurvivors(tmp_path, {0: 3}, num_batches=20)
    check(program, out=folder)
    again = replace(program, folder=tmp_path / "again", kills={}, epochs=5, algorithm="d-psgd")
    again.folder.mkdir()
    run = pl.launch(again, workers=WORKERS, resume=folder)
    assert run.result["workers_lost"] == []
    steps = steps_of(again.folder, WORKERS)
    samples_again = Counter(n for own in steps for step in own for batch in step for n in batch)
    assert samples_again == dict.fromkeys(range(79), 3)


def test_a_dead_worker_is_not_replaced(tmp_path):
    run, _ = check(GossipSurvivors(tmp_path, {0: 2}, num_batches=20), restarts=1)
    assert run.result["restarts"] == 0
    assert "d-psgd does not replace dead workers." in run.result["notes"]


def test_a_worker_that_stops_early_ends_the_run(tmp_path):
    """It is no dead worker: its loop has left an epoch that the others go through."""
    program = GossipSurvivors(tmp_path, fails={2: 3}, num_batches=20, algorithm="d-psgd")
    with pytest.raises(pl.PacelineError, match="label 17") as raised:
        pl.launch(program, workers=WORKERS)
    raised.value.__traceback__ = None


@pytest.mark.soak
def test_a_hundred_runs_with_deaths(tmp_path):
    """Writes what became of them to PACELINE_SOAK_RESULTS."""
    before, begun_s, deaths = leftovers.everything(), time.monotonic(), 0
    for number in range(100):
        draws, folder = random.Random(f"gossip survivors {number}"), tmp_path / str(number)
        folder.mkdir()
        workers = draws.randint(2, 5)
        victims = draws.sample(range(workers), draws.randint(1, workers - 1))
        options = {
            "at": draws.choice(["forward", "backward", "step"]),
            "optimizer": draws.choice(["sgd", "adam"]),
            "data": draws.choice(["plain", "drawn", "list"]),
            "num_batches": draws.choice([5, 7, 10, 23]),
            "epochs": draws.choice([1, 2, 5]),
            "sums": draws.random() < 0.3,
        }
        program = GossipSurvivors(folder, {one: draws.randrange(8) for one in victims}, **options)
        topology = draws.choice(["ring", "complete", "exponential"])
        run, _ = check(program, workers, topology, getattr(gossip, topology))
        deaths += len(run.result["workers_lost"])
    leftovers.assert_nothing_new(before)
    took_s = round(time.monotonic() - begun_s, 1)
    soak_results.keep("soak_gossip_survivors", "d-psgd", {"runs": 100, "deaths": deaths, "took_s": took_s})
