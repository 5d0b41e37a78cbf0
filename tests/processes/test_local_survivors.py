"""Methods with local steps go on without workers that are killed, on one machine."""

import json
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import leftovers
import paceline as pl
import rounds
import soak_results
from chosen import each_value, soaked
from exact_codec import exact_codec  # noqa: F401
from paceline.memory.failpoints import ENVIRONMENT_VARIABLE
from paceline.records import checkpoint_files
from processes.drill import Drill
from processes.local_reference import (
    EACH,
    LATE,
    LATEST,
    LOCAL,
    LONG,
    LONGEST,
    METHODS,
    OUTER,
    PARTS,
    PLAIN,
    STREAM,
    WARM,
    WHOLE,
    LocalReference,
    Training,
    coded,
    lives_of,
    steps_in,
    steps_of,
)
from processes.survivors import Survivors, samples
from rounds import made, run_task, shuffled, task_file

WORKERS, NUM_BATCHES = 3, 7
NUM_RUNS = 600
MEANS = [LOCAL, LATE, STREAM]  # methods that differ in how means are made; the others differ in periods and rates


def named(one):
    return getattr(one, "spec", str(one))


def check(method, program, last=None, workers=WORKERS, *, num_missing=0, resumed=None, **options):
    """Survivors are equal and as one process would have trained; each sample counts once an epoch."""
    program = replace(program, algorithm=method.spec)
    run = pl.launch(program, workers=workers, **options)
    assert sorted(run.result["workers_lost"]) == sorted(program.kills)
    alive = [one for one in range(workers) if one not in program.kills]
    first, *others = program.models(alive)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    steps = steps_of(program.folder, workers)
    reference = LocalReference(method, Training.of(program), steps, program.kills | (last or {}), resumed)
    for name, value in reference.train().items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)
    assert max(reference.counted.values()) <= program.epochs
    assert program.epochs * len(samples(program.num_batches)[0]) - reference.counted.total() == num_missing
    return run


@pytest.mark.parametrize("method", MEANS, ids=named)
def test_without_deaths(method, tmp_path):
    check(method, Survivors(tmp_path))


KILLS = {
    "worker 0": {0: 1},
    "two at once, the first among them": {0: 2, 2: 2},
    "one after the other": {0: 1, 1: 3},
    "first step": {1: 0},
    "an epoch's last round": {2: 3},
    "alone in it": {0: 3},
    "in the second epoch": {0: 5},
    "in the last round": {1: 7},
}
SOME_KILLS = ["one after the other", "in the second epoch"]


@pytest.mark.parametrize(("method", "kills"), each_value(MEANS, [*KILLS]), ids=named)
def test_whoever_dies_whenever(method, kills, tmp_path):
    check(method, Survivors(tmp_path, KILLS[kills]))


@pytest.mark.parametrize(
    ("method", "kills"), each_value([one for one in METHODS if one not in MEANS], SOME_KILLS), ids=named
)
def test_other_periods_and_rates_go_on_too(method, kills, tmp_path):
    check(method, Survivors(tmp_path, KILLS[kills]))


@pytest.mark.parametrize(("method", "at"), each_value(MEANS, ["backward", "step"]), ids=named)
def test_dies_within_a_step(method, at, tmp_path):
    kills = {1: 4}
    check(method, Survivors(tmp_path, kills, at=at), {1: 5} if at == "step" else None)


@pytest.mark.parametrize(("hit", "last"), [(1, 3), (2, 3), (3, 3), (4, 6), (5, 6)])
def test_a_worker_that_has_brought_its_model_counts(hit, last, tmp_path, monkeypatch):
    """A mean has two barriers. The third hit is at an epoch's end: its fourth batch is dealt again in the next epoch."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"lockstep.arrived@1#{hit}")
    check(LOCAL, Survivors(tmp_path, {1: -1}), {1: last})


@pytest.mark.parametrize(("hit", "last"), [(1, 4), (2, 5), (3, 5), (4, 8)])
def test_a_worker_that_has_brought_a_late_model_counts(hit, last, tmp_path, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"lockstep.arrived@0#{hit}")
    check(LATE, Survivors(tmp_path, {0: -1}), {0: last})


@pytest.mark.parametrize(
    ("method", "options"),
    each_value(
        [LOCAL, STREAM],
        [
            {"clips": True},
            {"data": "list"},
            {"scales": True},
            {"sums": True},
            {"net": "normalized"},
            {"ahead": True},
            {"epochs": 5, "num_batches": 5},
            {"optimizer": "adam", "data": "drawn", "epochs": 7, "num_batches": 4},
            {"data": "processes", "epochs": 4, "num_batches": 4},
        ],
    ),
    ids=named,
)
def test_with(method, options, tmp_path):
    check(method, Survivors(tmp_path, {0: 2}, **options))


@pytest.mark.parametrize(("method", "kill"), each_value([LATE, EACH, LOCAL, STREAM], [1, 3, 8]), ids=named)
def test_steps_of_several_batches(method, kill, tmp_path):
    """The survivors' last round may be the first half of a step that they do not make."""
    program = Survivors(tmp_path, {0: kill}, per_step=2, num_batches=24, marks=True)
    check(method, program, {0: kill // 2}, num_missing=7 * ((method, kill) in [(EACH, 3), (LOCAL, 8)]))


@pytest.mark.parametrize(
    ("method", "options"),
    each_value(
        [LONG, LATEST],
        [
            {"data": "processes", "epochs": 4, "num_batches": 4},
            {"optimizer": "adam", "data": "drawn", "epochs": 7, "num_batches": 4},
            {"epochs": 5, "num_batches": 5},
        ],
    ),
    ids=named,
)
def test_periods_longer_than_an_epoch_with(method, options, tmp_path):
    check(method, Survivors(tmp_path, {0: 2}, **options))


def test_five_workers_of_whom_one_is_left(tmp_path):
    check(LOCAL, Survivors(tmp_path, {0: 1, 1: 1, 3: 4, 4: 5}, num_batches=23), workers=5)


@pytest.mark.parametrize("method", [LOCAL, LATE, STREAM, coded(STREAM), *soaked(LONGEST, coded(LATE))], ids=named)
def test_a_run_that_has_lost_a_worker_is_resumed_with_a_successor(method, tmp_path):
    folder, program = tmp_path / "run", Survivors(tmp_path, {0: 3}, optimizer="adam")
    check(method, program, out=folder)
    made = len(steps_of(tmp_path, WORKERS)[1])
    check(method, replace(program, kills={}, epochs=5), {0: 3}, resumed=made, resume=folder)


@pytest.mark.parametrize(
    ("method", "killed"),
    each_value(
        [LOCAL, LONG, LATE, STREAM],
        [("replicated.mid_write@0#2", {0: 1}), ("replicated.mid_write@1#1", {1: 0}), ("ring.unwritten@0#2", {0: 2})],
    ),
    ids=named,
)
def test_a_task_goes_on(method, killed, tmp_path, monkeypatch):
    """Killed within its second step or its first one, and after the second."""
    point, last = killed
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, point)
    name = task_file(tmp_path, NUM_BATCHES)
    run, parameters = run_task(method.spec, "momentum", name, WORKERS, "processes", out=tmp_path / "run")
    assert run.result["workers_lost"] == list(last)
    assert run.result["records_lost"] == point.startswith("ring")
    steps = steps_in(run.records)
    steps[0] += [[[3]]] if point.startswith("ring") else []
    batches = [batch for epoch in shuffled(NUM_BATCHES) for batch in epoch]
    data = lambda batch: batches[batch[0]]  # noqa: E731
    training = Training(made, rounds.OPTIMIZERS["momentum"], data, nn.functional.cross_entropy)
    reference = LocalReference(method, training, steps, last)
    for one, other in zip(parameters, reference.train().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert reference.counted == dict.fromkeys(range(rounds.EPOCHS * NUM_BATCHES), 1)


def check_replaced(method, program, *, deaths=1, restarts=9, ended=(), workers=WORKERS):
    """As `check`, after so many deaths, each followed by a replacement that took part, except those of the workers `ended`."""
    program = replace(program, algorithm=method.spec)
    run = pl.launch(program, workers=workers, restarts=restarts)
    entered = sum(len(program.entered(worker)) for worker in range(workers))
    assert (len(run.result["workers_lost"]), entered) == (deaths, deaths - len(ended))
    assert run.result["records_lost"] == 0
    check_models(method, program, workers, ended)
    return run


def check_models(method, program, workers=WORKERS, ended=()):
    """All have the reference's model, except those that have `ended`; each sample counts once an epoch."""
    first, *others = program.models([one for one in range(workers) if one not in ended])
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    steps, lives = lives_of(program, workers, ended)
    reference = LocalReference(method, Training.of(program), steps, {}, lives=lives)
    for name, value in reference.train().items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)
    assert reference.counted == dict.fromkeys(range(len(samples(program.num_batches)[0])), program.epochs)


@pytest.mark.parametrize(
    ("method", "worker"),
    [
        *[(LOCAL, 0), (WARM, 1), (LATE, 1), (WHOLE, 0), (OUTER, 2), (PARTS, 1), (STREAM, 0)],
        *[(coded(LOCAL), 1), (coded(WHOLE), 0), (coded(STREAM), 2)],
    ],
    ids=named,
)
def test_a_replacement_takes_the_dead_workers_place(method, worker, tmp_path):
    """Under `WHOLE` an average is under way whenever it can come in."""
    program = Survivors(tmp_path, {worker: 2}, optimizer="adam", newcomers={4: {worker: 1}}, num_batches=30)
    check_replaced(method, program)


@pytest.mark.parametrize(
    "spec",
    [
        "local-sgd(period=3, codec=sign)",
        "da-sgd(period=3, delay=3, local_weight=0.5, compensate=false, codec=qsgd(bits=4))",
        "diloco(period=4, fragments=2, delay=1, local_weight=0.5, codec=dq(target_bits=3))",
        "local-sgd(period=3, codec=power(rank=1, min_rate=1.5, warmup_steps=1))",
    ],
)
def test_a_replacement_with_a_codec_that_rounds(spec, tmp_path):
    """In the rounds after it has come, all compare what they have in common."""
    program = Survivors(tmp_path, {1: 2}, spec, newcomers={4: {1: 1}}, num_batches=30)
    run = pl.launch(program, workers=WORKERS, restarts=1)
    assert (run.result["workers_lost"], list(program.entered(1))) == ([1], [1])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (WHOLE, {"clips": True, "sums": True}),
        (STREAM, {"net": "normalized"}),
        *soaked((OUTER, {"data": "processes"})),
    ],
    ids=named,
)
def test_a_replacement_with(method, options, tmp_path):
    options = {"newcomers": {4: {1: 1}}, "num_batches": 30} | options
    check_replaced(method, Survivors(tmp_path, {1: 2}, **options))


@pytest.mark.parametrize("options", [{"schedule": "follow"}, {"schedule": "epoch"}], ids=str)
def test_a_replacement_has_the_others_learning_rates(options, tmp_path):
    number = 12 if options["schedule"] == "epoch" else 4  # in the second epoch
    program = Survivors(tmp_path, {1: 2}, LATE.spec, newcomers={number: {1: 1}}, num_batches=30, **options)
    assert pl.launch(program, workers=WORKERS, restarts=1).result["restarts"] == 1
    lines = [(tmp_path / f"steps-{worker}.jsonl").read_text().splitlines() for worker in range(WORKERS)]
    first, second, third = ({k: rate for k, (rate, _) in map(json.loads, own)} for own in lines)
    assert first == third == first | second
    assert len({*first.values()}) > 1 < len(second) - 2


def test_a_replacement_of_a_loop_that_has_fetched_an_epochs_end(tmp_path):
    """In the epoch's last step: the others have waited for each other already, as they fetched ahead."""
    program = Survivors(tmp_path, {2: [6]}, newcomers={6: {2: 1}}, num_batches=5, epochs=8, data="list", ahead=True)
    check_replaced(PLAIN, program)
    assert program.entered(2)[1] % 3 == 0


def test_a_replacement_trains_on_a_batch_of_an_epoch_before_it_came(tmp_path):
    """Worker 0 dies in the epoch in which worker 1 comes, in the middle of a period that began in the epoch before."""
    comes = {3: {1: 1}, 8: {1: 1}}  # the next mean is in the second epoch
    program = Survivors(tmp_path, {1: [1], 0: 12}, newcomers=comes, num_batches=11, epochs=9, data="drawn")
    check_replaced(LATEST, program, deaths=2, restarts=1, ended=[0])


def test_a_replacement_knows_which_batches_the_average_under_way_contains(tmp_path):
    """Worker 0 dies after that average has been merged, and before the next one is."""
    program = Survivors(tmp_path, {1: [2], 0: 12}, newcomers={4: {1: 1}}, num_batches=40)
    check_replaced(WHOLE, program, deaths=2, restarts=1, ended=[0])


def test_replacements_of_replacements(tmp_path):
    kills, newcomers = {1: [2, 3], 0: 8}, {4: {1: 1}, 14: {1: 2}, 16: {0: 1}}
    program = Survivors(tmp_path, kills, newcomers=newcomers, num_batches=60, optimizer="adam")
    check_replaced(STREAM, program, deaths=3)


def test_a_replacement_that_dies_in_its_first_step_is_replaced(tmp_path):
    program = Survivors(tmp_path, {1: [2, 1]}, newcomers={4: {1: 1}, 14: {1: 2}}, num_batches=60)
    check_replaced(WHOLE, program, deaths=2)


def test_a_worker_that_dies_as_it_gives_its_state_is_replaced_like_the_one_that_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "newcomers.let_in@0#1")
    program = Survivors(tmp_path, {1: 2}, WHOLE.spec, newcomers={4: {1: 1}, 14: {0: 1, 1: 2}}, num_batches=60)
    run = pl.launch(program, workers=WORKERS, restarts=2)
    assert (sorted(run.result["workers_lost"]), [*program.entered(1)]) == ([0, 1], [2])
    check_models(WHOLE, program)


def test_a_batch_that_is_in_the_mean_of_one_fragment_only_is_dealt_again(tmp_path, monkeypatch):
    """Worker 1 dies in the mean that contains its model, and its replacement comes before the next mean."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "lockstep.arrived@1#5")
    program = Survivors(tmp_path, {1: [-1]}, newcomers={5: {1: 1}}, num_batches=30)
    check_replaced(PARTS, program)


@pytest.mark.parametrize(
    ("spec", "number"),
    [("diloco(period=3, delay=auto)", 1), ("da-sgd(period=3, delay=auto)", 12)],
    ids=["before", "after"],
)
def test_a_replacement_has_the_delay_that_the_others_choose(spec, number, tmp_path):
    """The choice is made after the sixth step."""
    program = Survivors(tmp_path, {1: number}, spec, newcomers={number + 1: {1: 1}}, num_batches=60)
    assert pl.launch(program, workers=WORKERS, restarts=1).result["restarts"] == len(program.entered(1)) == 1
    first, *others = program.models(range(WORKERS))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.parametrize(
    ("options", "why"), [({"scales": True}, "GradScaler"), ({"schedule": "own"}, "own count of steps")]
)
def test_the_others_go_on_without_a_replacement_that_cannot_take_part(options, why, tmp_path):
    program = Survivors(tmp_path, {1: 2}, LOCAL.spec, newcomers={9: {1: 1}}, num_batches=40, **options)
    run = pl.launch(program, workers=WORKERS, restarts=1)
    assert any("Worker 1 is not replaced" in note and why in note for note in run.result["notes"])
    first, other = program.models([0, 2])
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("method", ["local-sgd(period=3)", "diloco(period=4, fragments=2, delay=1)"])
def test_a_replacement_in_a_task(method):
    drill = Drill(method, kill={1: 20}, restarts=1)
    drill.until = lambda progress: drill.is_back(1)
    assert (drill.run().result["workers_lost"], drill.supervisor.outcome.restarts) == ([1], 1)


@pytest.mark.parametrize(
    ("method", "kills"),
    each_value([LOCAL, LATE, PARTS, STREAM], [*SOME_KILLS, "two at once, the first among them"]),
    ids=named,
)
def test_changes_that_travel_through_a_codec(method, kills, tmp_path):
    check(coded(method), Survivors(tmp_path, KILLS[kills]))


@pytest.mark.parametrize(
    ("method", "hit"),
    [(LOCAL, 1), (STREAM, 2), (LOCAL, 3), (STREAM, 4), (STREAM, 5), (LOCAL, 6), (STREAM, 7), (LOCAL, 8)],
    ids=named,
)
def test_a_worker_that_dies_between_the_two_operations_of_a_coded_mean(method, hit, tmp_path, monkeypatch):
    """Each operation has two barriers. A mean contains a worker that has brought its part to both operations."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"lockstep.arrived@1#{hit}")
    program = replace(Survivors(tmp_path, {1: -1}), algorithm=coded(method).spec)
    run = pl.launch(program, workers=WORKERS)
    first, other = program.models([0, 2])
    assert all(torch.equal(first[name], other[name]) for name in first)
    assert run.result["workers_lost"] == [1]
    steps = steps_of(tmp_path, WORKERS)
    found = []
    for last in range(len(steps[1]) + 1):
        reference = LocalReference(method, Training.of(program), steps, {1: last}).train()
        found += [last] * all(
            torch.allclose(first[name], one, rtol=1e-9, atol=1e-12) for name, one in reference.items()
        )
    assert found, "as if it had died before or after one of its means"


def drawn(draws, folder):
    """A method, a loop and its workers, some of which die at drawn instants, once or together, and are perhaps replaced."""
    workers = draws.randint(2, 5)
    victims = draws.sample(range(workers), draws.randint(1, workers - 1))
    together = draws.randrange(8)
    kills = {one: together if draws.random() < 0.3 else draws.randrange(8) for one in victims}
    options = {
        "optimizer": draws.choice(["sgd", "adam"]),
        "at": draws.choice(["forward", "backward", "step"]),
        "data": draws.choice(["plain", "drawn", "list"]),
        "num_batches": draws.choice([5, 7, 10, 23]),
        "epochs": draws.choice([1, 2, 5]),
        "sums": draws.random() < 0.3,
    }
    if draws.random() < 0.5:
        kills = {one: number % 6 for one, number in kills.items()}
        newcomers = {8: dict.fromkeys(victims, 1)}
        options |= {"num_batches": 80, "newcomers": newcomers, "at": "forward", "clips": draws.random() < 0.3}
        options["epochs"] = min(2, options["epochs"])  # more, and training with some outer optimizers is chaotic
    method = draws.choice(METHODS)
    if "newcomers" in options and method is LONGEST:
        options |= {"epochs": 5, "newcomers": {47: dict.fromkeys(victims, 1)}}  # just before the first mean
    return method, Survivors(folder, kills, **options), workers


@pytest.mark.soak
def test_many_runs_with_deaths(tmp_path):
    """Writes what became of them to PACELINE_SOAK_RESULTS."""
    before, begun_s, deaths, replaced = leftovers.everything(), time.monotonic(), 0, 0
    for number in range(NUM_RUNS):
        draws, folder = random.Random(f"local survivors {number}"), tmp_path / str(number)
        folder.mkdir()
        method, program, workers = drawn(draws, folder)
        if program.newcomers:
            run = check_replaced(method, program, deaths=len(program.kills), workers=workers)
        else:
            run = check_drawn(method, program, workers)
        deaths, replaced = deaths + len(run.result["workers_lost"]), replaced + run.result["restarts"]
    leftovers.assert_nothing_new(before)
    took_s = round(time.monotonic() - begun_s, 1)
    soak_results.keep(
        "soak_survivors",
        "local-sgd, da-sgd and diloco",
        {"runs": NUM_RUNS, "deaths": deaths, "replaced": replaced, "took_s": took_s},
    )


def check_drawn(method, program, workers):
    """A worker may have had its last batch before its instant; one that dies after it takes steps with it."""
    program = replace(program, algorithm=method.spec)
    run = pl.launch(program, workers=workers)
    lost, steps = run.result["workers_lost"], steps_of(program.folder, workers)
    first, *others = program.models([one for one in range(workers) if one not in lost])
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    reference = LocalReference(method, Training.of(program), steps, {one: len(steps[one]) for one in lost})
    for name, value in reference.train().items():
        torch.testing.assert_close(first[name], value, rtol=1e-7, atol=1e-10)
    assert max(reference.counted.values()) <= program.epochs
    if program.at == "forward":
        assert reference.counted == dict.fromkeys(range(len(samples(program.num_batches)[0])), program.epochs)
    return run


@pytest.mark.parametrize(
    ("spec", "kill"), each_value(["da-sgd(period=3, delay=auto)", "diloco(period=3, delay=auto)"], [2, 5, 6])
)
def test_the_delay_is_chosen_by_the_living(spec, kill, tmp_path):
    """After the sixth step; a dead worker's times are no part of the choice."""
    program = Survivors(tmp_path, {0: kill}, spec, epochs=4)
    assert pl.launch(program, workers=WORKERS).result["workers_lost"] == [0]
    first, second = program.models([1, 2])
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", [LOCAL, LATE, STREAM], ids=named)
def test_an_epochs_checkpoint_has_a_part_for_the_dead(method, tmp_path):
    """An error ends the run once there is one, and the run is resumed from the beginning of an epoch."""
    folder = tmp_path / "run"
    program = Survivors(tmp_path, {1: 1}, method.spec, fails={0: 2}, saved=folder, epochs=100_000)
    with pytest.raises(pl.PacelineError, match="label 17") as raised:
        pl.launch(program, workers=WORKERS, out=folder, checkpoint_every_s=0)
    raised.value.__traceback__ = None
    done = int(checkpoint_files.newest(folder / "checkpoint").name) // 10
    second = tmp_path / "second"
    second.mkdir()
    program = replace(program, folder=second, kills={}, fails={}, epochs=done + 3)
    run = pl.launch(program, workers=WORKERS, resume=folder)
    assert run.result["workers_lost"] == []
    times = Counter(n for own in steps_of(second, WORKERS) for step in own for batch in step for n in batch)
    assert times == dict.fromkeys(range(39), 3)


@pytest.mark.parametrize(
    ("method", "samples_before"), each_value([EACH, LOCAL, LATE, STREAM], [50, 200, 400]), ids=named
)
def test_a_run_that_is_stopped_after_a_death_is_resumed_in_the_middle_of_an_epoch(method, samples_before, tmp_path):
    folder, program = tmp_path / "run", Survivors(tmp_path, {1: 4}, method.spec, epochs=100_000)
    run = pl.launch(program, workers=WORKERS, out=folder, limit_samples=samples_before)
    made = len(steps_of(tmp_path, WORKERS)[0])
    assert run.result["workers_lost"] == [1]
    epochs = run.result["samples"] // len(samples(program.num_batches)[0]) + 3
    check(method, replace(program, kills={}, epochs=epochs), {1: 4}, resumed=made, resume=folder)
