"""Lockstep methods go on without workers that are killed, on one machine."""

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import leftovers
import paceline as pl
import soak_results
from chosen import each_value, soaked
from exact_codec import CODED, exact_codec  # noqa: F401
from paceline.membership.environment import current_environment
from paceline.memory.failpoints import ENVIRONMENT_VARIABLE
from paceline.records import checkpoint_files
from paceline.records.run_data import RunData
from processes.drill import Drill
from processes.survivors import EPOCHS, LET_IN_NEXT_EPOCH, Survivors, own_samples, samples
from processes.survivors import model as made

WORKERS = 3
NUM_RUNS = 700
METHODS, UNREMEMBERED = ["lockstep", "all-reduce"], "all-reduce(codec=exact)"
REPLACED = {"kills": {1: 2}, "newcomers": {4: {1: 1}}, "fails": {0: 8}}
SPARSE = {"net": "sparse", "optimizer": "adagrad"}
ENDS_EARLY = {"kills": {1: 5}, "fails": {0: 5}}
LOST_IN_LAST_STEP = {"ahead": True, "data": "drawn", "num_batches": 9, "kills": {1: 2}, "fails": {0: 5}}


def run_of(program, workers=WORKERS, **options):
    run = pl.launch(program, workers=workers, **options)
    assert sorted(run.result["workers_lost"]) == sorted(program.kills)
    return run


def check(program, run, workers=WORKERS, *, num_unrecorded=0, epochs=EPOCHS, num_missing=0):
    """Survivors are equal and as one process would have trained; each sample counts once an epoch."""
    alive = [one for one in range(workers) if one not in program.kills]
    first, *others = program.models(alive)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    counted = program.counted(run.records)
    assert list(counted) == list(range(1, run.result["version"] + 1))
    times = Counter(n for parts in counted.values() for _, part in parts for n in own_samples(part))
    assert max(times.values()) <= epochs
    assert epochs * len(samples(program.num_batches)[0]) - times.total() == num_missing
    assert run.result["records_lost"] == num_unrecorded
    for name, value in program.replayed(counted).items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", ["forward", "backward", "step"])
def test_survivors_train_on_what_the_dead_worker_left(method, at, tmp_path):
    program = Survivors(tmp_path, {1: 2}, method, at=at)
    check(program, run_of(program), num_unrecorded=at == "step")


@pytest.mark.parametrize("hit", [1, 2, 5, 6, 9])
def test_a_worker_that_has_brought_its_gradient_counts(hit, tmp_path, monkeypatch):
    """A round has two barriers: with the first, the dead worker owes its part of the sum; with the second, nothing."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"lockstep.arrived@1#{hit}")
    program = Survivors(tmp_path, {1: -1}, "lockstep")
    check(program, run_of(program), num_unrecorded=1)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_dies_while_it_steps_leaves_its_own_copy_torn(worker, tmp_path, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"replicated.mid_write@{worker}#3")
    program = Survivors(tmp_path, {worker: -1})
    run = run_of(program)
    assert run.result["torn_updates"] == 1
    check(program, run, num_unrecorded=1)


KILLS = {
    "worker 0": {0: 1},
    "two at once, the first among them": {0: 2, 2: 2},
    "one after the other": {0: 1, 1: 3},
    "first step": {1: 0},
    "last round": {2: 3},
    "alone in it": {0: 3},
}


@pytest.mark.parametrize(
    ("method", "kills"), [*each_value(METHODS, [*KILLS]), *each_value([CODED, UNREMEMBERED], [*KILLS])]
)
def test_whoever_dies_whenever(method, kills, tmp_path):
    program = Survivors(tmp_path, KILLS[kills], method)
    check(program, run_of(program))


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam"},
        {"clips": True},
        {"optimizer": "adam", "clips": True, "algorithm": "lockstep"},
        {"data": "processes"},
        {"data": "drawn"},
        {"data": "list"},
        {"sums": True},
        {"scales": True, "clips": True},
        {"scales": True, "algorithm": "lockstep"},
        {"ahead": True},
        {"twice": True},
        {"algorithm": CODED, "clips": True, "sums": True},
        {"algorithm": CODED, "twice": True},
        {"algorithm": UNREMEMBERED, "scales": True, "optimizer": "adam"},
        SPARSE | {"clips": True},
        SPARSE | {"scales": True, "data": "processes"},
        SPARSE | {"twice": True},
        *soaked({"data": "processes", "algorithm": "lockstep"}),
    ],
    ids=str,
)
def test_with(options, tmp_path):
    program = Survivors(tmp_path, {0: 2}, **options)
    check(program, run_of(program), epochs=EPOCHS * (1 + program.twice))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options",
    [{"at": "forward"}, {"at": "backward"}, {"at": "step"}, {"kills": {0: 1, 2: 3}}, {"kills": {0: 3}}],
    ids=str,
)
def test_sparse_gradients_of_survivors(method, options, tmp_path):
    program = Survivors(tmp_path, algorithm=method, **{"kills": {1: 2}} | SPARSE | options)
    check(program, run_of(program), num_unrecorded=program.at == "step")


@pytest.mark.parametrize(
    ("method", "hit", "counts"),
    [
        *(("lockstep", hit, hit % 6 in (5, 0)) for hit in (1, 2, 3, 4, 5, 6, 9, 11)),
        *(("all-reduce", hit, False) for hit in (1, 2, 3, 4, 9, 10)),
    ],
)
def test_a_sparse_gradient_counts_as_a_whole_or_not_at_all(method, hit, counts, tmp_path, monkeypatch):
    """A round has six barriers: two for the numbers of rows, two for the rows, and two for the sum."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"lockstep.arrived@1#{hit}")
    program = Survivors(tmp_path, {1: -1}, method, **SPARSE)
    run = run_of(program)
    if method == "lockstep" and not counts:  # the loop has noted a step that was not made
        path = tmp_path / "steps-1.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    check(program, run, num_unrecorded=int(counts))


BY_SPEED = ["lockstep(shares=auto)", "all-reduce(shares=auto)", "all-reduce(shares=auto, codec=exact(feedback=true))"]


@pytest.mark.parametrize(
    ("method", "options"),
    each_value(
        BY_SPEED,
        [
            {"kills": {0: 12}},
            {"kills": {1: 12}},
            {"kills": {1: 3, 2: 17}, "data": "drawn"},
            {"kills": {1: 11}, "data": "processes"},
            {"kills": {2: 19}, "ahead": True, "data": "drawn"},
            {"kills": {1: 19, 2: 19}, "ahead": True},
            {"kills": {0: 12}, "clips": True, "optimizer": "adam", "sums": True},
            {"kills": {1: 12}, "scales": True},
            {"kills": {2: 12}, "twice": True},
        ],
    ),
    ids=str,
)
def test_batches_by_speed_keep_their_samples_when_workers_die(method, options, tmp_path):
    """Batches have other sizes from the sixth step on; an epoch has 20 rounds of three workers."""
    program = Survivors(tmp_path, algorithm=method, num_batches=60, slow_s=2e-3, **options)
    run = run_of(program)
    sizes = np.concatenate([rows["samples"] for rows in run.records.values()])
    assert sizes.max() > 4, "batches had other sizes"
    check(program, run, epochs=EPOCHS * (1 + program.twice))


@pytest.mark.parametrize("method", METHODS)
def test_a_scaler_steps_in_a_round_without_batches(method, tmp_path):
    """The last round's only batch is lost with its worker, and dealt again in another round."""
    program = Survivors(tmp_path, {0: 3}, method, scales=True)
    check(program, run_of(program))


@pytest.mark.parametrize(
    ("kills", "data"), each_value([{0: 3}, {1: 2}, {1: 2, 2: 2}], ["plain", "drawn", "list", "processes"]), ids=str
)
def test_what_is_lost_as_a_loop_that_fetches_ahead_ends_an_epoch_comes_in_the_next(data, kills, tmp_path):
    program = Survivors(tmp_path, kills, data=data, ahead=True, num_batches=10 if 0 in kills else 9)
    check(program, run_of(program))


class LooksAtCheckpoint(Survivors):
    """In the third epoch, notes what the worker's part of the checkpoint of its beginning says is left."""

    def _die(self, worker, at, number):
        if at == self.at and number == 8:
            (folder,) = (self.saved / "checkpoint").glob(str(2 * self.num_batches))
            left = torch.load(folder / f"worker-{worker.worker_id}.pt")["left"]
            (self.folder / f"left-{worker.worker_id}").write_text(str(left))
        super()._die(worker, at, number)


def test_an_epochs_checkpoint_has_what_was_lost_in_the_epoch_before(tmp_path):
    folder = tmp_path / "run"
    program = LooksAtCheckpoint(tmp_path, {1: 5}, saved=folder, ahead=True, num_batches=9, epochs=3)
    run = pl.launch(program, workers=WORKERS, out=folder, checkpoint_every_s=0)
    assert [(tmp_path / f"left-{one}").read_text() for one in (0, 2)] == ["[18, 16]"] * 2
    check(program, run, epochs=3)


@pytest.mark.parametrize("options", [{}, {"marks": True}, {"algorithm": "lockstep"}], ids=str)
def test_steps_of_several_batches(options, tmp_path):
    """The worker dies with the second batch of its second step: if only steps have means, the first one is dealt again."""
    program = Survivors(tmp_path, {0: 3}, per_step=2, num_batches=14, epochs=1, **options)
    run = run_of(program)
    assert run.result["samples"] == 55 - (0 if options else 4)


@pytest.mark.parametrize("options", [{"marks": True}, {"algorithm": "lockstep"}], ids=str)
def test_steps_of_several_batches_are_made_anew(options, tmp_path):
    program = Survivors(tmp_path, {0: 1}, per_step=2, num_batches=12, **options)
    check(program, run_of(program))


def check_replaced(program, run, *, deaths, **expected):
    """As `check`, after that many deaths, each followed by a replacement that took part."""
    assert (len(run.result["workers_lost"]), run.result["restarts"]) == (deaths, deaths)
    entered = {(worker, int(n)) for worker, rows in run.records.items() for n in rows["incarnation"] if n}
    assert len(entered) == deaths
    assert sum("was replaced" in note for note in run.result["notes"]) == deaths
    check(replace(program, kills={}), run, **expected)


@pytest.mark.parametrize(("method", "worker"), each_value([*METHODS, CODED], [0, 1, 2]))
def test_a_replacement_takes_the_dead_workers_place(method, worker, tmp_path):
    program = Survivors(tmp_path, {worker: 2}, method, optimizer="adam", newcomers={4: {worker: 1}}, num_batches=30)
    check_replaced(program, pl.launch(program, workers=WORKERS, restarts=1), deaths=1)


@pytest.mark.parametrize(
    ("method", "worker", "options"),
    each_value(BY_SPEED, [0, 1], [{"data": "drawn", "ahead": True}, {"data": "processes"}, {}]),
    ids=str,
)
def test_a_replacement_knows_which_samples_batches_by_speed_have(method, worker, options, tmp_path):
    program = Survivors(
        tmp_path, {worker: 12}, method, newcomers={14: {worker: 1}}, num_batches=150, slow_s=2e-3, **options
    )
    run = pl.launch(program, workers=WORKERS, restarts=1)
    check_replaced(program, run, deaths=1)


def lacking(rows):
    """How many versions lie between a dead worker's last step and its replacement's first."""
    own = rows["applied_version"][rows["applied_version"] > 0]
    return max(np.diff(np.sort(own)), default=1) - 1


@pytest.mark.parametrize(("method", "worker"), each_value([*METHODS, CODED, "all-reduce(shares=auto)"], [0, 2]))
def test_too_few_workers_wait_for_a_replacement(method, worker, tmp_path):
    """Only the step in which the worker died is made without it."""
    program = Survivors(tmp_path, {worker: 2}, method, optimizer="adam")
    run = pl.launch(program, workers=WORKERS, restarts=1, min_workers=3)
    check_replaced(program, run, deaths=1)
    assert lacking(run.records[worker]) <= 1


def test_too_few_workers_end_if_too_few_replacements_come(tmp_path):
    """One of two dead workers is replaced, and waits."""
    program = Survivors(tmp_path, {1: 2, 2: 2})
    with pytest.raises(pl.WorkerLostError, match=r"(is|are) left, fewer than min_workers=3, and no"):
        pl.launch(program, workers=WORKERS, restarts=1, min_workers=3)


def test_too_few_workers_with_batches_of_their_own_end(tmp_path):
    with pytest.raises(pl.WorkerLostError, match="min_workers=3: dead workers can be replaced only if the loop uses"):
        pl.launch(OwnBatches(), workers=WORKERS, min_workers=3)


@dataclass(frozen=True)
class OwnBatches:
    def __call__(self):
        net = made()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with pl.attach(net, optimizer, algorithm="all-reduce") as worker:
            for step in range(10):
                if worker.worker_id == 1 and step == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                net(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
                optimizer.step()


def test_enough_workers_do_not_wait(tmp_path):
    """Nobody would come."""
    program = Survivors(tmp_path, {1: 2})
    check(program, run_of(program, min_workers=2))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scales", [False, True])
def test_too_few_workers_that_nobody_comes_to_end_with_a_checkpoint_of_the_last_step(method, scales, tmp_path):
    """No replacement is left, or the others cannot let it in; a resumed run trains on each other batch once."""
    first, second, folder = tmp_path / "first", tmp_path / "second", tmp_path / "run"
    first.mkdir()
    second.mkdir()
    program = Survivors(first, {1: 2}, method, scales=scales)
    with pytest.raises(pl.WorkerLostError, match="Only 2 of 3 workers are left, fewer than min_workers=3, and no"):
        pl.launch(program, workers=WORKERS, out=folder, min_workers=3, restarts=int(scales))
    before = RunData.load(folder, decided=False).records
    program = replace(program, folder=second, kills={})
    run = pl.launch(program, workers=2, resume=folder)
    made = max(int(rows["applied_version"].max()) for rows in before.values())
    after = {one: rows[rows["applied_version"] > made] for one, rows in run.records.items()}
    counted = replace(program, folder=first).counted(before) | program.counted(after)
    times = Counter(n for parts in counted.values() for _, part in parts for n in own_samples(part))
    assert times == dict.fromkeys(range(len(samples(program.num_batches)[0])), EPOCHS)


class TooLate(Survivors):
    """A replacement calls `attach` when the others have ended."""

    def __call__(self):
        if current_environment().incarnation:
            leftovers.wait_until((self.folder / "model-2.pt").exists, "the others' end")
        super().__call__()


def test_workers_that_wait_for_others_end_if_the_run_is_stopped(tmp_path):
    """They make the step that they were about to make, and a checkpoint of it, as at any other end."""

    def look(progress):
        if progress.version == 3 and not asked:  # made without worker 1: they wait
            asked.append(True)
            signal.raise_signal(signal.SIGINT)

    asked, program, folder = [], TooLate(tmp_path, {1: 2}), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        pl.launch(program, workers=WORKERS, restarts=1, min_workers=3, out=folder, on_progress=look)
    result = RunData.load(folder).result
    assert (result["outcome"], result["outcome_reason"]) == ("stopped", "Interrupted by Ctrl-C.")
    assert not [note for note in result["notes"] if "checkpoint" in note]
    assert result["version"] in (3, 4)
    assert int(checkpoint_files.newest_or_none(folder / "checkpoint").name) > 0
    assert all(torch.equal(*pair) for pair in zip(*(one.values() for one in program.models([0, 2])), strict=True))


@pytest.mark.parametrize("number", [2, 6])
def test_a_replacement_of_a_worker_whose_last_gradient_counts(number, tmp_path, monkeypatch):
    """It comes in the round in which the worker has died, so that no mean lacks the worker; or later."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "lockstep.arrived@1#5")
    program = Survivors(tmp_path, {1: -1}, "lockstep", newcomers={number: {1: 1}}, num_batches=30)
    check_replaced(program, pl.launch(program, workers=WORKERS, restarts=1), deaths=1, num_unrecorded=1)


@pytest.mark.parametrize("method", [*METHODS, "all-reduce(codec=qsgd)"])
def test_a_replacement_in_a_task(method, monkeypatch):
    """The run is stopped once the replacement takes part: until then, all batches but that of the missing record."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "replicated.mid_write@1#20")
    drill = Drill(method, restarts=1)
    drill.until = lambda progress: drill.is_back(1)
    run = drill.run()
    assert (run.result["workers_lost"], run.result["restarts"], run.result["records_lost"]) == ([1], 1, 1)
    batches = np.concatenate([rows["batch"][rows["samples"] > 0] for rows in run.records.values()])
    assert len({*batches}) == len(batches) == batches.max()


@pytest.mark.parametrize(
    "options",
    [
        {"clips": True, "sums": True},
        {"data": "processes"},
        {"data": "drawn"},
        {"data": "list"},
        {"ahead": True},
        {"num_batches": 10, "newcomers": {3: {1: 1}}, "epochs": 3},
        LET_IN_NEXT_EPOCH,
        {"twice": True, "algorithm": "lockstep"},
        {"schedule": "epoch", "newcomers": {20: {1: 1}}},
        {"schedule": "follow"},
        {"schedule": "step"},
        {"schedule": "plateau"},
        {"per_step": 2, "marks": True, "num_batches": 48},
        {"net": "taught"},
        SPARSE,
        SPARSE | {"algorithm": "lockstep"},
        *soaked({"twice": True}),
    ],
    ids=str,
)
def test_a_replacement_with(options, tmp_path):
    options = {"newcomers": {4: {1: 1}}, "num_batches": 30} | options
    program = Survivors(tmp_path, {1: 2}, **options)
    check_replaced(
        program, pl.launch(program, workers=WORKERS, restarts=1), deaths=1, epochs=program.epochs * (1 + program.twice)
    )


def test_a_replacement_goes_on_alone_with_those_that_come_after_it(tmp_path):
    """All workers of the beginning die within the rounds in which replacements are compared with them."""
    program = Survivors(tmp_path, {1: 2, 0: 8}, newcomers={4: {1: 1}}, num_batches=40)
    run = pl.launch(program, workers=2, restarts=1)
    assert (sorted(run.result["workers_lost"]), run.result["restarts"]) == ([0, 1], 1)
    check(replace(program, kills={0: 8}), run, workers=2)


def test_replacements_of_replacements(tmp_path):
    program = Survivors(
        tmp_path, {1: [2, 3], 0: 8}, newcomers={4: {1: 1}, 14: {1: 2}, 16: {0: 1}}, num_batches=60, optimizer="adam"
    )
    check_replaced(program, pl.launch(program, workers=WORKERS, restarts=5), deaths=3)


def test_a_worker_that_dies_as_it_gives_its_state_is_replaced_like_the_one_that_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "newcomers.let_in@0#1")
    program = Survivors(tmp_path, {1: 2}, newcomers={4: {1: 1}, 10: {0: 1, 1: 2}}, num_batches=60)
    run = pl.launch(program, workers=WORKERS, restarts=2)
    assert (sorted(run.result["workers_lost"]), run.result["restarts"]) == ([0, 1], 3)
    assert {int(n) for n in run.records[1]["incarnation"]} == {0, 2}
    check(replace(program, kills={}), run)


def test_the_others_go_on_without_a_replacement_that_cannot_have_their_scaler(tmp_path):
    program = Survivors(tmp_path, {1: 2}, newcomers={9: {1: 1}}, num_batches=40, scales=True)
    run = run_of(program, restarts=1)
    assert any("Worker 1 is not replaced" in note and "GradScaler" in note for note in run.result["notes"])
    check(program, run)


def test_a_replacement_whose_loop_counts_steps_by_itself_leaves(tmp_path):
    """Its learning rates differ, which shows in its third round; the others are equal and go on."""
    program = Survivors(tmp_path, {1: 2}, newcomers={9: {1: 1}}, num_batches=40, schedule="own")
    run = run_of(program, restarts=1)
    assert any("Worker 1 is not replaced" in note and "own count of steps" in note for note in run.result["notes"])
    assert 0 < (run.records[1]["incarnation"] == 1).sum() < 5
    first, other = program.models([0, 2])
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("method", ["lockstep", "all-reduce(shares=auto)"])
def test_an_epochs_checkpoint_has_a_part_for_a_newcomer_that_came_after_it(method, tmp_path):
    """The sum between the epochs lets the supervisor look at the others' parts before the newcomer has entered."""
    program = Survivors(tmp_path, {1: 2}, method, **LET_IN_NEXT_EPOCH)
    run = pl.launch(program, workers=WORKERS, restarts=1, out=tmp_path / "run", checkpoint_every_s=0)
    check_replaced(program, run, deaths=1, epochs=3)


def test_a_stream_loses_the_dead_workers_batch(tmp_path):
    program = Survivors(tmp_path, {0: 2}, data="stream")
    check(program, run_of(program), num_missing=4)


@pytest.mark.parametrize(
    ("method", "resumed"),
    each_value(
        [*METHODS, CODED],
        [
            (1, {}),
            (2, {}),
            (3, {}),
            (5, {}),
            (2, {"ahead": True}),
            (2, LOST_IN_LAST_STEP),
            (2, REPLACED),
            (3, REPLACED),
        ],
    ),
    ids=str,
)
def test_any_number_of_workers_goes_on_after_deaths_and_an_error(method, resumed, tmp_path):
    """In the middle of an epoch, in which a dead worker's batch may be the next one."""
    workers, options = resumed
    check_resumed(Survivors(tmp_path, algorithm=method, optimizer="adam", epochs=3, **ENDS_EARLY | options), workers)


@pytest.mark.parametrize(("method", "data", "fails"), each_value(BY_SPEED, ["plain", "drawn"], [45, 17]))
def test_a_resumed_run_knows_which_samples_batches_by_speed_have(method, data, fails, tmp_path):
    """The remaining batches were sized for three workers, one of which has died."""
    options = {"kills": {1: 12}, "fails": {0: fails}, "data": data, "slow_s": 2e-3, "num_batches": 60}
    check_resumed(Survivors(tmp_path, algorithm=method, epochs=3, **options), WORKERS)


def check_resumed(program, workers):
    """Ends a run by an error, resumes it with so many workers, and compares it with one process."""
    folder, first, second = (program.folder / name for name in ("run", "first", "second"))
    first.mkdir()
    second.mkdir()
    program = replace(program, folder=first)
    with pytest.raises(pl.PacelineError, match="label 17") as raised:
        pl.launch(program, workers=WORKERS, out=folder, restarts=len(program.newcomers))
    raised.value.__traceback__ = None
    before = RunData.load(folder, decided=False).records
    made = max(int(rows["applied_version"].max()) for rows in before.values())
    assert made == program.fails[0]
    program = replace(program, folder=second, kills={}, fails={}, newcomers={})
    run = pl.launch(program, workers=workers, resume=folder)
    after = {one: rows[rows["applied_version"] > made] for one, rows in run.records.items()}
    counted = replace(program, folder=first).counted(before) | program.counted(after)
    assert list(counted) == list(range(1, run.result["version"] + 1))
    times = Counter(n for parts in counted.values() for _, part in parts for n in own_samples(part))
    assert times == dict.fromkeys(range(len(samples(program.num_batches)[0])), 3)
    for model in program.models(range(workers)):
        for name, value in program.replayed(counted).items():
            torch.testing.assert_close(model[name], value, rtol=1e-9, atol=1e-12)


def drawn(draws, folder):
    """A loop and its workers, some of which die at drawn instants, once or together, and are perhaps replaced."""
    workers = draws.randint(2, 5)
    victims = draws.sample(range(workers), draws.randint(1, workers - 1))
    per_step = draws.choice([1, 1, 1, 2])
    together, is_by_speed = draws.randrange(6), draws.random() < 0.3
    later = 8 * is_by_speed  # after batches have got other sizes
    kills = {one: later + (together if draws.random() < 0.3 else draws.randrange(6)) for one in victims}
    options = {
        "algorithm": draws.choice([*METHODS, CODED]),
        "optimizer": draws.choice(["sgd", "adam"]),
        "at": draws.choice(["forward", "backward"]),
        "data": draws.choice(["plain", "drawn", "list"]),
        "num_batches": draws.choice([7, 10, 23]),
        "sums": draws.choice([False, False, True, "epoch"]),
    }
    if draws.random() < 0.5:
        options |= {"num_batches": 60 + 8 * later, "newcomers": {8 + later: dict.fromkeys(victims, 1)}}
    if is_by_speed:
        options |= {"algorithm": draws.choice(BY_SPEED), "data": draws.choice(["plain", "drawn"]), "slow_s": 1e-3}
    return replace(Survivors(folder, kills, marks=per_step > 1, per_step=per_step), **options), workers


@pytest.mark.soak
def test_many_runs_with_deaths(tmp_path):
    """Writes what became of them to PACELINE_SOAK_RESULTS."""
    before, begun_s, deaths, replaced = leftovers.everything(), time.monotonic(), 0, 0
    for number in range(NUM_RUNS):
        draws, folder = random.Random(f"survivors {number}"), tmp_path / str(number)
        folder.mkdir()
        program, workers = drawn(draws, folder)
        run = pl.launch(program, workers=workers, restarts=len(program.kills) if program.newcomers else 0)
        lost = run.result["workers_lost"]  # a worker may have had its last batch before its instant
        assert run.result["outcome"] == "stopped", (number, run.result["outcome_reason"])
        deaths, replaced = deaths + len(lost), replaced + run.result["restarts"]
        models = program.models([one for one in range(workers) if program.newcomers or one not in lost])
        assert all(torch.equal(models[0][name], other[name]) for other in models[1:] for name in models[0]), number
        if program.per_step == 1:
            counted = program.counted(run.records)
            times = Counter(n for parts in counted.values() for _, part in parts for n in own_samples(part))
            assert times == dict.fromkeys(range(len(samples(program.num_batches)[0])), EPOCHS), number
            for name, value in program.replayed(counted).items():
                torch.testing.assert_close(models[0][name], value, rtol=1e-7, atol=1e-10)
    leftovers.assert_nothing_new(before)
    took_s = round(time.monotonic() - begun_s, 1)
    soak_results.keep(
        "soak_survivors",
        "lockstep and all-reduce",
        {"runs": NUM_RUNS, "deaths": deaths, "replaced": replaced, "took_s": took_s},
    )
