"""`kill -9` at random instants, in every method."""

import os
import random
import signal
import time

import pytest
import torch

import leftovers
import paceline as pl
import soak_results
from contracts.linear_task import LINEAR
from paceline.memory.failpoints import ENVIRONMENT_VARIABLE
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from processes import programs
from processes.drill import METHODS, WORKERS, Drill, kill_one


@pytest.mark.parametrize("method", [one for one in METHODS if "backoff" not in one and "peers" not in one])
def test_a_kill_at_a_random_instant(method):
    """`make soak` kills all of METHODS 50 times, those too that differ only in how they wait or whom they average with."""
    kill_one(method, random.Random(f"{method} 0"))


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
def test_fifty_kills(method):
    """Writes what became of each method's kills to PACELINE_SOAK_RESULTS."""
    before, begun_s = leftovers.everything(), time.monotonic()
    runs = [kill_one(method, random.Random(f"{method} soak {number}")) for number in range(50)]
    leftovers.assert_nothing_new(before)
    soak_results.keep("soak_kill", method, figures_of([run.result for run in runs], begun_s))


def figures_of(results, begun_s):
    """What is kept of a method's kills."""
    return {
        "kills": len(results),
        "outcomes": {
            name: sum(one["outcome"] == name for one in results) for name in {one["outcome"] for one in results}
        },
        "torn_updates": sum(one["torn_updates"] for one in results),
        "lowest_test_accuracy": min(one["test_accuracy"] for one in results),
        "leftovers": 0,
        "took_s": round(time.monotonic() - begun_s, 1),
    }


FAIL_POINTS = [
    ("locked", "lock.taken", 41),  # for reading: odd hits; for writing: even ones
    ("locked", "lock.taken", 42),
    ("locked", "locked.mid_write", 30),
    ("locked(backoff=exponential)", "lock.taken", 42),
    ("locked(kind=rwlock)", "lock.taken", 41),
    ("locked(kind=rwlock)", "lock.taken", 42),
    ("locked(kind=rwlock)", "locked.mid_write", 30),
    ("hogwild", "racing.mid_write", 30),
    ("leashed", "slots.claimed", 30),
    ("leashed", "slots.hazard_set", 41),  # before the gradient: odd hits; before the update: even ones
    ("leashed", "slots.hazard_set", 42),
    ("leashed", "slots.published", 30),
    ("leashed(persistence=0)", "slots.claimed", 30),
    ("ad-psgd", "replicated.mid_write", 30),
    ("leashed", "ring.unwritten", 30),
    ("ad-psgd", "ring.unwritten", 30),
    ("ad-psgd", "order.unwritten", 30),
    ("downpour(push=1)", "ring.unwritten", 30),
]
#: Where a version has been made whose record has not been written.
BETWEEN = ("slots.published", "ring.unwritten")


@pytest.mark.parametrize(("method", "point", "hit"), FAIL_POINTS)
def test_a_kill_at_a_fail_point(method, point, hit, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"{point}@1#{hit}")
    drill = Drill(method)
    drill.killed_at[1] = 0  # the run is stopped only after this worker was lost
    run = drill.run()
    result = run.result
    assert result["outcome"] == "stopped", result["outcome_reason"]
    assert result["workers_lost"] == [1]
    # A worker of these writes its record while its model is marked as being written.
    assert result["torn_updates"] == ("mid_write" in point or (point == "ring.unwritten" and pl.parse(method).gossip))
    assert result["records_lost"] == (point in BETWEEN)
    num_records = sum(len(rows) for rows in run.records.values())
    assert result["steps"] + result["dropped_updates"] == num_records + result["records_lost"]
    assert pl.parse(method).gossip or result["steps"] == result["version"]
    assert torch.isfinite(drill.parameters.x).all()
    assert result["test_accuracy"] > 0.7


@pytest.mark.parametrize("method", ["locked", "hogwild", "leashed", "all-reduce"])
def test_all_workers_killed(method):
    drill = Drill(method, kill={0: 10, 1: 20, 2: 30})
    result = drill.run().result
    assert result["outcome"] == "crashed"
    assert "signal 9" in result["outcome_reason"]
    assert "no worker is left" in result["outcome_reason"]
    assert sorted(result["workers_lost"]) == [0, 1, 2]


@pytest.mark.parametrize("method", ["sequential", "lockstep", "hogwild"])
def test_the_only_worker_killed(method):
    drill = Drill(method, workers=1, kill={0: 20})
    result = drill.run().result
    assert result["outcome"] == "crashed"
    assert "signal 9" in result["outcome_reason"]
    assert result["workers_lost"] == [0]


def check_replaced(run, victim=1):
    assert run.result["outcome"] == "stopped", run.result["outcome_reason"]
    assert run.result["restarts"] == 1
    assert run.result["workers_lost"] == [victim]
    records = run.records[victim]
    second = records[records["incarnation"] == 1]
    assert len(second) > 0
    assert second["step"].tolist() == list(range(1, len(second) + 1))
    batches = [batch for rows in run.records.values() for batch in rows["batch"]]
    assert len(batches) == len(set(batches)), "a batch was trained on twice"
    assert run.result["test_accuracy"] > 0.7
    return len(batches)


@pytest.mark.parametrize("method", ["locked(kind=rwlock)", "hogwild", "leashed", "ad-psgd", "ad-psgd(topology=star)"])
def test_a_dead_worker_is_replaced(method):
    drill = Drill(method, kill={1: 60}, restarts=1)
    drill.until = lambda progress: drill.is_back(1) and progress.version > 1000
    check_replaced(drill.run())


def replace_one(method, draws):
    """One drill in which a worker drawn from `draws` is killed and replaced; what came of it."""
    victim, steps = draws.randrange(WORKERS), draws.randrange(150)
    drill = Drill(method, kill={victim: steps}, restarts=1)
    drill.until = lambda progress: drill.is_back(victim) and progress.version > max(1000, drill.killed_at[victim] + 200)
    run = drill.run()
    check_replaced(run, victim)
    return run.result


@pytest.mark.soak
@pytest.mark.parametrize("method", [method for method in METHODS if "kill" in pl.parse(method).tolerates])
def test_fifty_replacements(method):
    """Writes what became of each method's successors to PACELINE_SOAK_RESULTS."""
    before, begun_s = leftovers.everything(), time.monotonic()
    results = [replace_one(method, random.Random(f"{method} replaced {number}")) for number in range(50)]
    leftovers.assert_nothing_new(before)
    soak_results.keep("soak_replaced", method, figures_of(results, begun_s))


class Another(Drill):
    """Kills a second worker as soon as the first one's successor is there, before that has been told where the others are."""

    def __init__(self, second, **options):
        super().__init__("ad-psgd", restarts=1, **options)
        self.second = second
        self.said_dead = set()  # workers that those which have yet to meet the others need not wait for

    def _look(self, progress):
        successor = next((one for one in self.supervisor.workers if one.incarnation), None)
        if successor is not None and self.second not in self.killed_at:
            assert not successor.ready  # it is this look's thread that will welcome it
            self.killed_at[self.second] = progress.version
            os.kill(self.supervisor.workers[self.second].handle.pid, signal.SIGKILL)
        store = self.supervisor.arena.shared_store()
        ended = {one: f"ended/{one}" for one in range(len(self.supervisor.workers))}
        self.said_dead |= {one for one, key in ended.items() if store.check([key]) and store.get(key) == b"0"}
        super()._look(progress)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_second_death_while_a_successor_starts(workers):
    """It needs one of the others, or none: its place has the dead one's model."""
    drill = Another(0, kill={1: 60}, workers=workers)
    drill.until = lambda progress: drill.is_back(1) and progress.version > 1000
    run = drill.run()
    assert run.result["outcome"] == "stopped", run.result["outcome_reason"]
    assert (run.result["workers_lost"], run.result["restarts"]) == ([1, 0], 1)
    assert drill.said_dead >= {0, 1}
    assert len(run.records[1][run.records[1]["incarnation"] == 1]) > 0
    assert run.result["test_accuracy"] > 0.7


# Before the gradient of its 61st step: a supervisor that waits for a core might kill it after its last.
@pytest.mark.parametrize(("method", "point"), [("locked", "lock.taken@1#121"), ("leashed", "slots.hazard_set@1#121")])
def test_its_successor_goes_on_with_its_part_of_the_data(method, point, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, point)
    drill = Drill(method, restarts=1, epochs=30, partition="fixed", until=10**9)
    num_batches = check_replaced(drill.run())
    assert num_batches == 30 * 180  # the batch that the dead worker was at is its successor's first


def test_a_worker_of_a_resumed_run_is_replaced(tmp_path, monkeypatch):
    """Its successor still needs the checkpoint, although newer ones have been completed since; so do replays, later."""
    settings = {"task": LINEAR, "partition": "fixed", "workers": WORKERS, "checkpoint_every_s": 0}
    pl.train(pl.TrainConfig(algorithm="locked", epochs=2, **settings), out=tmp_path)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "lock.taken@1#401")
    drill = Drill("locked", resume=tmp_path, restarts=1, epochs=12, until=10**9, **settings)
    resumed_from = checkpoint_files.newest(tmp_path / "checkpoint").name
    assert check_replaced(drill.run()) == 12 * 180
    newest = checkpoint_files.newest(tmp_path / "checkpoint").name
    assert {one.name for one in (tmp_path / "checkpoint").iterdir()} == {resumed_from, newest}


def test_what_a_kill_has_ended_is_resumed(tmp_path):
    method = "all-reduce(sharded=true)"
    settings = {"task": LINEAR, "workers": WORKERS, "checkpoint_every_s": 0}
    pl.train(pl.TrainConfig(algorithm=method, epochs=2, **settings), out=tmp_path)
    killed = Drill(method, resume=tmp_path, kill={1: 60}, **settings).run().result
    assert killed["outcome"] == "crashed"
    assert "orker 1 " in killed["outcome_reason"]
    epochs_done = checkpoint.load_parameters(checkpoint_files.newest(tmp_path / "checkpoint")).next_batch // 180
    assert epochs_done >= 2
    resumed = pl.train(pl.TrainConfig(algorithm=method, epochs=epochs_done + 2, **settings), resume=tmp_path).result
    assert resumed["outcome"] == "stopped", resumed["outcome_reason"]
    # Worker 1 may die between the round that the others ended and its record of it: one batch of 8, or the last one of 5.
    samples_lost = (epochs_done + 2) * 1437 - resumed["samples"]
    assert (resumed["records_lost"], samples_lost) in {(0, 0), (1, 8), (1, 5)}
    assert resumed["test_accuracy"] > 0.7


def last_parameters(folder):
    return checkpoint.load_parameters(checkpoint_files.newest(folder / "checkpoint"))


@pytest.mark.parametrize("method", ["lockstep", "all-reduce"])
def test_a_loop_whose_worker_fails_goes_on_from_the_last_step(method, tmp_path):
    """Bit for bit as if nothing had happened."""
    settings = {"workers": WORKERS, "algorithm": method}
    pl.launch(programs.FailsInWorker1(method, tmp_path, never=True), out=tmp_path / "whole", **settings)
    program = programs.FailsInWorker1(method, tmp_path)
    with pytest.raises(pl.PacelineError, match="label 17") as raised:
        pl.launch(program, out=tmp_path / "run", **settings)
    raised.value.__traceback__ = None
    has_met = method == "all-reduce"  # within backward, before the worker was lost
    assert last_parameters(tmp_path / "run").version == 11 + 4 + has_met
    pl.launch(program, resume=tmp_path / "run", out=tmp_path / "run", **settings)
    assert torch.equal(last_parameters(tmp_path / "run").x, last_parameters(tmp_path / "whole").x)


@pytest.mark.parametrize("method", ["lockstep", "all-reduce"])
def test_batches_of_a_step_that_an_error_cut_short_are_dealt_again(method, tmp_path):
    settings = {"workers": WORKERS, "algorithm": method}
    pl.launch(
        programs.FailsInWorker1(method, tmp_path, never=True, accumulates=True), out=tmp_path / "whole", **settings
    )
    program = programs.FailsInWorker1(method, tmp_path, accumulates=True)
    with pytest.raises(pl.PacelineError, match="label 17") as raised:
        pl.launch(program, out=tmp_path / "run", **settings)
    raised.value.__traceback__ = None
    pl.launch(program, resume=tmp_path / "run", out=tmp_path / "run", **settings)
    assert torch.equal(last_parameters(tmp_path / "run").x, last_parameters(tmp_path / "whole").x)


@pytest.mark.parametrize("method", ["lockstep", "all-reduce"])
def test_an_error_in_the_middle_of_a_line_search_leaves_no_checkpoint_of_it(method, tmp_path):
    """The parameters are where the search has moved them."""
    program = programs.FailsInWorker1(method, tmp_path, searches=True)
    with pytest.raises(pl.PacelineError, match="label 17") as raised:
        pl.launch(program, out=tmp_path / "run", workers=WORKERS, algorithm=method)
    raised.value.__traceback__ = None
    assert checkpoint_files.newest_or_none(tmp_path / "run" / "checkpoint") is None, "no 10 s are over"


def test_without_all_of_the_state_the_last_epoch_is_left(tmp_path, monkeypatch):
    """A part of the optimizer's state died with the worker."""
    config = pl.TrainConfig(task=LINEAR, workers=WORKERS, epochs=2, batch_size=32, algorithm="all-reduce(sharded=true)")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "replicated.mid_write@1#9")
    killed = pl.train(config, out=tmp_path).result
    assert killed["outcome"] == "crashed"
    assert "checkpoint of the last step" not in " ".join(killed["notes"])
    assert last_parameters(tmp_path).version == 0


def test_after_a_kill_the_next_run_is_as_good_as_new():
    kill_one("leashed", random.Random(1))
    drill = Drill("leashed", until=300)
    result = drill.run().result
    assert (result["outcome"], result["workers_lost"]) == ("stopped", [])
    assert len(drill.supervisor.workers) == WORKERS
