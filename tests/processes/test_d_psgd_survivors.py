"""Workers of D-PSGD go on without those that are killed, on one machine."""

import json
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
from chosen import soaked
from oracles import gossip
from paceline.memory.failpoints import ENVIRONMENT_VARIABLE
from processes.drill import Drill
from processes.gossip_reference import GossipReference, GossipSurvivors, mean_of, square
from processes.local_reference import Training, lives_of, steps_in, steps_of
from processes.survivors import BATCH_SIZE, samples
from rounds import run_task, task_file

WORKERS = 4
NUM_RUNS = 300


def check(program, workers=WORKERS, topology="ring", neighbours=gossip.ring, *, dead=None, most_missed=0, **options):
    """Survivors end with the mean of their models, as one process would have trained these; each sample counts once an epoch.

    A worker that dies in the last rounds takes its batches with it. `dead`: those of whom no process is left, if not all
    that were lost.
    """
    program = replace(program, algorithm=f"d-psgd(topology={topology})")
    run = pl.launch(program, workers=workers, **options)
    dead = run.result["workers_lost"] if dead is None else dead
    notes, (steps, _) = program.notes(workers), lives_of(program, workers)
    reference = GossipReference(Training.of(program), steps, notes, neighbours, program.repeats(workers))
    expected = mean_of(reference.train(dead))
    for own in program.models([one for one in range(workers) if one not in dead]):
        for one, other in zip(own.values(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert {j for *_, j in notes.missing} <= {*run.result["workers_lost"]}
    counted = reference.counted(dead)
    assert max(counted.values()) == program.epochs
    missed = program.epochs * len(samples(program.num_batches)[0]) - counted.total()
    assert missed <= most_missed or {*dead} & {*notes.members[max(notes.members)]}
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
        *soaked({"per_step": 2, "num_batches": 48, "data": "processes"}),
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


def check_replaced(program, workers=WORKERS, *graph, deaths=1, dead=(), **options):
    """As `check`, after so many deaths, each followed by a replacement that took part, except those of the workers `dead`."""
    run, notes = check(program, workers, *graph, dead=dead, restarts=9, **options)
    assert len(run.result["workers_lost"]) == deaths
    assert sum(map(len, notes.came.values())) == deaths - len(dead)
    assert run.result["records_lost"] == 0
    return run, notes


@pytest.mark.parametrize("worker", [0, 1, 3])
def test_a_replacement_takes_the_dead_workers_place(worker, tmp_path):
    program = GossipSurvivors(tmp_path, {worker: 2}, optimizer="adam", newcomers={4: {worker: 1}}, num_batches=30)
    _, notes = check_replaced(program)
    (round, _), *_ = notes.came[worker]
    assert len(notes.members[round - 1]) == WORKERS - 1
    assert len(notes.members[round]) == WORKERS


@pytest.mark.parametrize(
    ("topology", "neighbours", "workers"),
    [
        ("complete", gossip.complete, 3),
        ("exponential", gossip.exponential, 5),
        ("one-peer-exponential", gossip.one_peer, 4),
        ("torus", square, 4),
        ("ring", gossip.ring, 2),
    ],
)
def test_a_replacement_in(topology, neighbours, workers, tmp_path):
    """A torus of three workers does not exist, and one of two workers trains alone meanwhile."""
    program = GossipSurvivors(tmp_path, {1: 2}, newcomers={4: {1: 1}}, num_batches=30)
    check_replaced(program, workers, topology=topology, neighbours=neighbours)


@pytest.mark.parametrize(
    "options",
    [
        {"clips": True, "sums": True},
        {"data": "drawn"},
        {"ahead": True},
        {"num_batches": 10, "newcomers": {2: {1: 1}}, "epochs": 4},
        *soaked({"data": "processes"}),
    ],
    ids=str,
)
def test_a_replacement_with(options, tmp_path):
    options = {"newcomers": {4: {1: 1}}, "num_batches": 30} | options
    check_replaced(GossipSurvivors(tmp_path, {1: 2}, **options))


@pytest.mark.parametrize("schedule", ["follow", "epoch", "step", "plateau"])
def test_a_replacement_has_the_others_learning_rates(schedule, tmp_path):
    number = 12 if schedule == "epoch" else 4  # in the second epoch
    program = GossipSurvivors(tmp_path, {1: 2}, "d-psgd", newcomers={number: {1: 1}}, num_batches=30, schedule=schedule)
    assert pl.launch(program, workers=3, restarts=1).result["restarts"] == 1
    lines = [(tmp_path / f"steps-{worker}.jsonl").read_text().splitlines() for worker in range(3)]
    first, second, third = ({k: rate for k, (rate, _) in map(json.loads, own)} for own in lines)
    assert first == third == first | second
    assert len({*first.values()}) > (schedule != "plateau")
    assert len(second) > 4


def test_a_replacement_comes_between_the_steps_of_two_batches(tmp_path):
    """In a loop that makes two steps with each batch."""
    program = GossipSurvivors(tmp_path, {1: 2}, "d-psgd", newcomers={4: {1: 1}}, num_batches=30, twice=True)
    run = pl.launch(program, workers=3, restarts=1)
    assert program.entered(1)[1] % 2 == 1
    assert run.result["records_lost"] == 0


def test_replacements_of_replacements(tmp_path):
    """Of worker 0, too, and of one that dies before its first step."""
    kills, newcomers = {1: [2, 3], 0: 8, 2: [12, 0]}, {4: {1: 1}, 14: {1: 2}, 16: {0: 1, 2: 1}, 22: {2: 2}}
    program = GossipSurvivors(tmp_path, kills, newcomers=newcomers, num_batches=90, optimizer="adam")
    check_replaced(program, deaths=5)


def test_two_workers_in_turn(tmp_path):
    """Worker 0 trains alone until worker 1 is replaced; then worker 1 trains alone."""
    program = GossipSurvivors(tmp_path, {1: 2, 0: 9}, newcomers={4: {1: 1}}, num_batches=60)
    run, notes = check(program, 2, dead=[0], restarts=1)
    assert sorted(run.result["workers_lost"]) == [0, 1]
    assert len(notes.came[1]) == 1


def test_a_replacement_comes_as_the_others_begin_a_step_of_several_batches(tmp_path):
    """The last step has too few batches to be made."""
    program = GossipSurvivors(tmp_path, {1: 2}, newcomers={4: {1: 1}}, num_batches=48, per_step=2, marks=True)
    _, notes = check(program, dead=(), most_missed=WORKERS * BATCH_SIZE, restarts=1)
    assert len(notes.came[1]) == 1


@pytest.mark.parametrize("number", [5, 6, 7, 8])
def test_another_worker_dies_as_a_replacement_comes(number, tmp_path, monkeypatch):
    """Once it has begun a round about the one in which the replacement comes, before it has sent its model."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"views.begun@2#{number}")
    program = GossipSurvivors(tmp_path, {1: 2}, newcomers={4: {1: 1}}, num_batches=40)
    check(program, dead=[2], restarts=1)


def test_a_worker_that_dies_as_it_gives_its_state_is_replaced_like_the_one_that_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "newcomers.let_in@0#1")
    program = GossipSurvivors(tmp_path, {1: 2}, newcomers={4: {1: 1}, 14: {0: 1, 1: 2}}, num_batches=60)
    run, notes = check(program, dead=(), restarts=2)
    assert (sorted(run.result["workers_lost"]), sorted(one for one in notes.came if notes.came[one])) == (
        [0, 1],
        [0, 1],
    )


def test_a_replacement_that_dies_as_the_run_ends(tmp_path):
    program = GossipSurvivors(tmp_path, {1: [2, 1]}, newcomers={4: {1: 1}}, num_batches=20)
    check(program, dead=[1], restarts=1)


def test_a_run_with_a_replacement_is_resumed(tmp_path):
    folder = tmp_path / "run"
    program = GossipSurvivors(tmp_path, {0: 2}, newcomers={4: {0: 1}}, num_batches=30)
    check_replaced(program, out=folder)
    again = replace(program, folder=tmp_path / "again", kills={}, newcomers={}, epochs=4, algorithm="d-psgd")
    again.folder.mkdir()
    assert pl.launch(again, workers=WORKERS, resume=folder).result["workers_lost"] == []
    samples_again = Counter(
        n for own in steps_of(again.folder, WORKERS) for step in own for batch in step for n in batch
    )
    assert samples_again == dict.fromkeys(range(119), 2)


def test_a_replacement_in_a_task(monkeypatch):
    """The run is stopped once the replacement takes part: until then, each batch has been trained on once."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "replicated.mid_write@1#20")
    drill = Drill("d-psgd", restarts=1)
    drill.until = lambda progress: drill.is_back(1)
    run = drill.run()
    assert (run.result["workers_lost"], run.result["restarts"]) == ([1], 1)
    batches = Counter(n for rows in run.records.values() for n in rows["batch"][rows["samples"] > 0].tolist())
    assert batches == dict.fromkeys(range(1 + max(batches)), 1)


def test_the_others_go_on_without_a_replacement_that_cannot_have_their_scaler(tmp_path):
    program = GossipSurvivors(tmp_path, {1: 2}, newcomers={9: {1: 1}}, num_batches=40, scales=True)
    run, _ = check(program, restarts=1)
    assert any("Worker 1 is not replaced" in note and "GradScaler" in note for note in run.result["notes"])


def test_a_replacement_whose_loop_counts_steps_by_itself_leaves(tmp_path):
    """Its learning rates differ, which shows in its third round; the others go on."""
    program = GossipSurvivors(tmp_path, {1: 2}, "d-psgd", newcomers={9: {1: 1}}, num_batches=40, schedule="own")
    run = pl.launch(program, workers=3, restarts=1)
    assert any("Worker 1 is not replaced" in note and "own count of steps" in note for note in run.result["notes"])
    assert 0 < (run.records[1]["incarnation"] == 1).sum() < 5


def test_a_worker_that_stops_early_ends_the_run(tmp_path):
    """It is no dead worker: its loop has left an epoch that the others go through."""
    program = GossipSurvivors(tmp_path, fails={2: 3}, num_batches=20, algorithm="d-psgd")
    with pytest.raises(pl.PacelineError, match="label 17") as raised:
        pl.launch(program, workers=WORKERS)
    raised.value.__traceback__ = None


@pytest.mark.soak
def test_many_runs_with_deaths(tmp_path):
    """Writes what became of them to PACELINE_SOAK_RESULTS."""
    before, begun_s, deaths, replaced = leftovers.everything(), time.monotonic(), 0, 0
    for number in range(NUM_RUNS):
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
        graph = workers, topology, getattr(gossip, topology)
        if draws.random() < 0.5:
            program = replace(program, at="forward", num_batches=80, newcomers={8: dict.fromkeys(victims, 1)})
            run, _ = check_replaced(program, *graph, deaths=len(victims))
        else:
            run, _ = check(program, *graph)
        deaths, replaced = deaths + len(run.result["workers_lost"]), replaced + run.result["restarts"]
    leftovers.assert_nothing_new(before)
    took_s = round(time.monotonic() - begun_s, 1)
    soak_results.keep(
        "soak_gossip_survivors", "d-psgd", {"runs": NUM_RUNS, "deaths": deaths, "replaced": replaced, "took_s": took_s}
    )
