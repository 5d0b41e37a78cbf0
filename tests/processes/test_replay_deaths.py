"""Replays of tasks in rounds in which workers were killed: the others went on without them, or with replacements."""

import json

import pytest

import paceline as pl
from paceline.run.recorded_order import ReplayMismatchError
from processes.replay_programs import SIGNS
from processes.test_replay import LOCKSTEP

TASK = (
    SIGNS
    + '''
from paceline.membership.environment import current_environment

KILLS = {}


class Dies:
    """A loss in which processes of workers are killed; if it `is_slow`, steps take 50 ms more until a replacement trains."""

    def __init__(self, *, is_slow):
        worker = current_environment()  # None in a replay
        self.process = (worker.worker_id, worker.incarnation) if worker is not None else None
        self.is_slow, self.calls = is_slow and worker is not None, 0

    def __call__(self, output, target):
        if output.requires_grad and self.process is not None:
            self.calls += 1
            if KILLS.get(self.process) == self.calls:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.process[1]:
                (HERE / "back").touch()
        if self.is_slow and not (HERE / "back").exists():
            time.sleep(0.05)
        return nn.functional.cross_entropy(output, target)


def named(epochs, **how):
    return pl.Task(
        name="signs", model=model, datasets=datasets, loss=Dies(**how), batch_size=8, learning_rate=0.05, epochs=epochs
    )


def dying():
    return named(3, is_slow=False)


def returning():
    return named(25, is_slow=True)
'''
)


@pytest.fixture
def trained(tmp_path):
    def train(algorithm, kills, kind="dying", **named):
        script = tmp_path / "signs.py"
        script.write_text(TASK.replace("KILLS = {}", f"KILLS = {kills}"))
        config = {"task": f"{script}:{kind}", "algorithm": algorithm, "workers": 3, "momentum": 0.9} | named
        folder = tmp_path / "run"
        pl.train(pl.TrainConfig(**config), **({"resume": folder} if folder.exists() else {"out": folder}))
        return folder

    return train


def repeated(folder, *lost, restarts=0, replaced=()):
    """Replays a run that has lost these workers, and in which these processes trained besides the first ones."""
    run = pl.RunData.load(folder)
    assert (sorted(run.result["workers_lost"]), run.result["restarts"]) == (sorted(lost), restarts)
    made = {(worker, n) for worker, rows in run.records.items() for n in rows["incarnation"].tolist() if n}
    assert made == {*replaced}
    assert run.result["replayable"], run.result["replayable_reason"]
    replayed = pl.RecordedRun(folder).replay()
    assert replayed.checkpoint is not None
    assert replayed.steps == sum(map(len, run.records.values())) - sum(
        run.result.get("resumed", {}).get("events", {}).values()
    )


@pytest.mark.parametrize("algorithm", LOCKSTEP)
def test_others_go_on(trained, algorithm):
    repeated(trained(algorithm, {(1, 0): 12}), 1)


@pytest.mark.parametrize(
    ("algorithm", "point"),
    [
        ("all-reduce", "lockstep.arrived@0#11"),  # its gradient counts, and the others reduce its part
        ("all-reduce", "lockstep.arrived@0#12"),
        ("lockstep", "ring.unwritten@1#6"),
        ("lockstep", "replicated.mid_write@1#6"),
        ("local-sgd(period=3)", "lockstep.arrived@0#5"),
        ("local-sgd(period=3)", "ring.unwritten@0#10"),  # at an epoch's end
        ("d-psgd", "views.begun@0#6"),  # before it has sent its model
        ("d-psgd", "replicated.mid_write@1#6"),
    ],
)
def test_a_death_between_the_operations_of_a_round(trained, algorithm, point, monkeypatch):
    monkeypatch.setenv("PACELINE_FAIL_POINT", point)
    repeated(trained(algorithm, {}), int(point.partition("@")[2][0]))


@pytest.mark.parametrize("algorithm", ["all-reduce", "local-sgd(period=3)", "diloco(period=6,fragments=2,delay=1)"])
def test_others_wait_for_replacements(trained, algorithm):
    """One dies again, another one is the first of the others."""
    folder = trained(algorithm, {(1, 0): 6, (1, 1): 4, (0, 0): 15}, restarts=3, min_workers=3)
    repeated(folder, 0, 1, 1, restarts=3, replaced=[(0, 1), (1, 1), (1, 2)])


@pytest.mark.parametrize("algorithm", ["lockstep", "da-sgd", "d-psgd"])
def test_others_train_until_the_replacement_comes(trained, algorithm):
    repeated(trained(algorithm, {(1, 0): 6}, "returning", restarts=1), 1, restarts=1, replaced=[(1, 1)])


def test_the_worker_that_gives_a_replacement_the_state_dies(trained, monkeypatch):
    monkeypatch.setenv("PACELINE_FAIL_POINT", "newcomers.let_in@0#1")
    folder = trained("all-reduce", {(1, 0): 6}, restarts=2, min_workers=3)
    repeated(folder, 0, 1, restarts=3, replaced=[(0, 1), (1, 2)])


def test_a_resumed_run(trained):
    trained("local-sgd(period=3)", {})
    repeated(trained("local-sgd(period=3)", {(1, 0): 6}, epochs=6), 1)


def test_an_update_without_the_dead_worker(trained):
    run = pl.RecordedRun(trained("all-reduce", {(1, 0): 12}))
    assert [step["worker"] for step in run.at(11).steps] == [0, 1, 2]
    assert [step["worker"] for step in run.at(12).steps] == [0, 2]


def changed(folder, change):
    path = folder / "result.json"
    result = json.loads(path.read_text())
    change(result["view_changes"])
    path.write_text(json.dumps(result))


@pytest.mark.parametrize("by", [-2, 2])
def test_a_death_elsewhere_is_a_difference(trained, by):
    folder = trained("lockstep", {(1, 0): 12})
    changed(folder, lambda changes: changes[0].update(left_at=changes[0]["left_at"] + by))
    with pytest.raises((ReplayMismatchError, pl.UsageError), match=r"differs from the run|contradict each other"):
        pl.RecordedRun(folder).replay()


def refused(folder, why):
    with pytest.raises(pl.UsageError, match=why):
        pl.RecordedRun(folder)


def test_a_run_that_did_not_record_it_is_refused(trained):
    folder = trained("lockstep", {(1, 0): 12})
    changed(folder, list.clear)
    refused(folder, "the records do not have when the others learnt of it")
    changed(folder, lambda changes: changes.append({"worker": 1}))
    refused(folder, "damaged")


def test_a_run_that_failed_is_refused(trained):
    folder = trained("lockstep", {(1, 0): 12}, min_workers=3)
    refused(folder, "a worker died, and so the run failed")
    assert pl.RunData.load(folder).result["replayable_reason"] == "A worker died, and so the run failed."


def test_small_buckets_are_refused(trained):
    refused(trained("all-reduce(bucket_bytes=1000)", {(1, 0): 12}), "with bucket_bytes below 65,536")
