"""Methods with local steps go on without workers that are killed, on one machine."""

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
from paceline.memory.failpoints import ENVIRONMENT_VARIABLE
from paceline.records import checkpoint_files
from processes.local_reference import (
    EACH,
    LATE,
    LATEST,
    LOCAL,
    LONG,
    LONGEST,
    METHODS,
    STREAM,
    LocalReference,
    Training,
    steps_in,
    steps_of,
)
from processes.survivors import Survivors, samples
from rounds import made, run_task, shuffled, task_file

WORKERS, NUM_BATCHES = 3, 7


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


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.spec)
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
#: Methods that differ in how means are made; of the others, which differ in periods and rates, each meets some deaths.
ALL_KILLS = [LOCAL, LATE, STREAM]
SOME_KILLS = ["one after the other", "in the second epoch"]


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize(
    "method",
    [one if one in ALL_KILLS else pytest.param(one, marks=pytest.mark.soak) for one in METHODS],
    ids=lambda one: one.spec,
)
def test_whoever_dies_whenever(method, kills, tmp_path):
    check(method, Survivors(tmp_path, KILLS[kills]))


@pytest.mark.parametrize("kills", SOME_KILLS)
@pytest.mark.parametrize("method", [one for one in METHODS if one not in ALL_KILLS], ids=lambda one: one.spec)
def test_other_periods_and_rates_go_on_too(method, kills, tmp_path):
    check(method, Survivors(tmp_path, KILLS[kills]))


@pytest.mark.parametrize("method", [LOCAL, LATE, STREAM], ids=lambda one: one.spec)
@pytest.mark.parametrize("at", ["backward", "step"])
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
    "options",
    [
        {"clips": True},
        {"data": "list"},
        {"sums": True},
        {"scales": True},
        {"ahead": True},
        {"net": "normalized"},
        {"epochs": 5, "num_batches": 5},
        {"optimizer": "adam", "data": "drawn", "epochs": 7, "num_batches": 4},
        {"data": "processes", "epochs": 7, "num_batches": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "method",
    [LOCAL, STREAM, *(pytest.param(one, marks=pytest.mark.soak) for one in (LONG, LATEST))],
    ids=lambda one: one.spec,
)
def test_with(method, options, tmp_path):
    check(method, Survivors(tmp_path, {0: 2}, **options))


@pytest.mark.parametrize("method", [EACH, LOCAL, LATE, STREAM], ids=lambda one: one.spec)
@pytest.mark.parametrize("kill", [1, 3, 8])
def test_steps_of_several_batches(method, kill, tmp_path):
    """The survivors' last round may be the first half of a step that they do not make."""
    program = Survivors(tmp_path, {0: kill}, per_step=2, num_batches=24, marks=True)
    check(method, program, {0: kill // 2}, num_missing=7 * ((method, kill) in [(EACH, 3), (LOCAL, 8)]))


@pytest.mark.parametrize("method", [LONG, LATEST], ids=lambda one: one.spec)
@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 5, "num_batches": 5},
        {"optimizer": "adam", "data": "drawn", "epochs": 7, "num_batches": 4},
        {"data": "processes", "epochs": 7, "num_batches": 4},
    ],
    ids=str,
)
def test_periods_longer_than_an_epoch_with(method, options, tmp_path):
    check(method, Survivors(tmp_path, {0: 2}, **options))


def test_five_workers_of_whom_one_is_left(tmp_path):
    check(LOCAL, Survivors(tmp_path, {0: 1, 1: 1, 3: 4, 4: 5}, num_batches=23), workers=5)


@pytest.mark.parametrize("method", [LOCAL, LONGEST, LATE, STREAM], ids=lambda one: one.spec)
def test_a_run_that_has_lost_a_worker_is_resumed_with_a_successor(method, tmp_path):
    folder, program = tmp_path / "run", Survivors(tmp_path, {0: 3}, optimizer="adam")
    check(method, program, out=folder)
    made = len(steps_of(tmp_path, WORKERS)[1])
    check(method, replace(program, kills={}, epochs=5), {0: 3}, resumed=made, resume=folder)


@pytest.mark.parametrize("method", [LOCAL, LONG, LATE, STREAM], ids=lambda one: one.spec)
@pytest.mark.parametrize(
    ("point", "last"),
    [("replicated.mid_write@0#2", {0: 1}), ("replicated.mid_write@1#1", {1: 0}), ("ring.unwritten@0#2", {0: 2})],
)
def test_a_task_goes_on(method, point, last, tmp_path, monkeypatch):
    """Killed within its second step or its first one, and after the second."""
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


@pytest.mark.parametrize(
    "spec", ["local-sgd(codec=fp16)", "da-sgd(codec=qsgd(bits=4))", "diloco(period=2, codec=fp16)"]
)
def test_others_end_with_an_error(spec, tmp_path):
    with pytest.raises(pl.WorkerLostError, match="Worker 0 was ended by signal 9") as raised:
        pl.launch(Survivors(tmp_path, {0: 2}, spec), workers=WORKERS)
    raised.value.__traceback__ = None


def drawn(draws, folder):
    """A method, a loop and its workers, some of which die at drawn instants, once or together."""
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
    return draws.choice(METHODS), Survivors(folder, kills, **options), workers


@pytest.mark.soak
def test_three_hundred_runs_with_deaths(tmp_path):
    """Writes what became of them to PACELINE_SOAK_RESULTS."""
    before, begun_s, deaths = leftovers.everything(), time.monotonic(), 0
    for number in range(300):
        draws, folder = random.Random(f"local survivors {number}"), tmp_path / str(number)
        folder.mkdir()
        method, program, workers = drawn(draws, folder)
        deaths += len(check_drawn(method, program, workers).result["workers_lost"])
    leftovers.assert_nothing_new(before)
    took_s = round(time.monotonic() - begun_s, 1)
    soak_results.keep("soak_local_survivors", "local methods", {"runs": 300, "deaths": deaths, "took_s": took_s})


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


@pytest.mark.parametrize("spec", ["da-sgd(period=3, delay=auto)", "diloco(period=3, delay=auto)"])
@pytest.mark.parametrize("kill", [2, 5, 6])
def test_the_delay_is_chosen_by_the_living(spec, kill, tmp_path):
    """After the sixth step; a dead worker's times are no part of the choice."""
    program = Survivors(tmp_path, {0: kill}, spec, epochs=4)
    assert pl.launch(program, workers=WORKERS).result["workers_lost"] == [0]
    first, second = program.models([1, 2])
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", [LOCAL, LATE, STREAM], ids=lambda one: one.spec)
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


@pytest.mark.parametrize("method", [EACH, LOCAL, LATE, STREAM], ids=lambda one: one.spec)
@pytest.mark.parametrize("samples_before", [50, 200, 400])
def test_a_run_that_is_stopped_after_a_death_is_resumed_in_the_middle_of_an_epoch(method, samples_before, tmp_path):
    folder, program = tmp_path / "run", Survivors(tmp_path, {1: 4}, method.spec, epochs=30)
    run = pl.launch(program, workers=WORKERS, out=folder, limit_samples=samples_before)
    made = len(steps_of(tmp_path, WORKERS)[0])
    assert run.result["workers_lost"] == [1]
    check(method, replace(program, kills={}), {1: 4}, resumed=made, resume=folder)
