"""Replays of runs in real processes: with dropout, and with a worker killed and replaced."""

import random
import shutil

import pytest

import paceline as pl
import soak_results
from chosen import soaked
from paceline.run.checkpointer import Checkpointer
from processes.replay_programs import SIGNS

TASK = (
    SIGNS
    + '''
import numpy

CALLS = 12


class Dies:
    """A loss in which the first process that comes to its 12th step is killed, once."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, target):
        self.calls += 1
        if output.requires_grad and self.calls == CALLS:
            try:
                (HERE / "killed").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(output, target)


class Replaced(Dies):
    """As `Dies`, with a replacement that says when it trains."""

    def __init__(self):
        super().__init__()
        self.is_replacement = (HERE / "killed").exists()

    def __call__(self, output, target):
        loss = super().__call__(output, target)
        if output.requires_grad and self.is_replacement:
            (HERE / "back").touch()
        return loss

    def is_missing(self):
        return (HERE / "killed").exists() and not (HERE / "back").exists()


class Returns(Replaced):
    """The others wait for the replacement, which trains on with them."""

    def __call__(self, output, target):
        loss = super().__call__(output, target)
        while self.calls == CALLS + 3 and self.is_missing():
            time.sleep(0.01)
        return loss


class Slow(Replaced):
    """Steps take 20 ms more from the death until the replacement trains."""

    def __call__(self, output, target):
        loss = super().__call__(output, target)
        if self.is_missing():
            time.sleep(0.02)
        return loss


class Drawing(torch.utils.data.Dataset):
    """Each sample is NumPy's next number, which is noted."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        number = float(numpy.random.random())
        with (HERE / f"drawn-{os.getpid()}").open("a") as file:
            print(number, file=file)
        return torch.full((6,), number), 0


def drawing():
    data = Drawing()
    return pl.Task(name="drawing", model=model, datasets=lambda folder: (data, data), batch_size=8, epochs=1)


def named(loss, epochs=3):
    return pl.Task(
        name="signs", model=model, datasets=datasets, loss=loss, batch_size=8, learning_rate=0.05, epochs=epochs
    )


def steady():
    return named(nn.functional.cross_entropy)


def dying():
    return named(Dies())


def returning():
    return named(Returns())


def slow():
    return named(Slow(), epochs=60)
'''
)


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "signs.py"
    path.write_text(TASK)
    return path


def trained(folder, task, algorithm, **named):
    pl.train(pl.TrainConfig(task=str(task), algorithm=algorithm, workers=3, momentum=0.9, **named), out=folder)
    return folder


@pytest.mark.parametrize(
    "algorithm", ["leashed", "parameter-server(mode=async)", "downpour(push=2,fetch=2)", "all-reduce"]
)
def test_dropout_of_each_process_is_repeated(tmp_path, task, algorithm):
    folder = trained(tmp_path / "run", f"{task}:steady", algorithm)
    assert pl.RecordedRun(folder).replay().checkpoint is not None


@pytest.mark.parametrize("algorithm", ["leashed", "parameter-server(mode=async,shards=2)", "all-reduce", "ad-psgd"])
def test_a_resumed_run_goes_on_with_its_dropout(tmp_path, task, algorithm, monkeypatch):
    """From a checkpoint in the middle, as if the run had been killed after it."""
    monkeypatch.setattr(Checkpointer, "end", lambda *_: None)
    folder = trained(tmp_path / "run", f"{task}:steady", algorithm, epochs=12, checkpoint_every_s=0.0)
    monkeypatch.undo()
    config = pl.TrainConfig(task=f"{task}:steady", algorithm=algorithm, workers=3, momentum=0.9, epochs=15)
    run = pl.train(config, resume=folder)
    assert run.result["resumed"]["version"] < run.result["version"]
    assert pl.RecordedRun(folder).replay().checkpoint is not None


@pytest.mark.parametrize("algorithm", ["locked", "leashed", "parameter-server(mode=async,shards=2)", "ad-psgd"])
def test_a_killed_worker_and_its_replacement_are_repeated(tmp_path, task, algorithm):
    folder = trained(tmp_path / "run", f"{task}:returning", algorithm, restarts=1)
    run = pl.RunData.load(folder)
    assert (len(run.result["workers_lost"]), run.result["restarts"]) == (1, 1)
    assert max(rows["incarnation"].max() for rows in run.records.values()) == 1
    assert pl.RecordedRun(folder).replay().checkpoint is not None


IN_ROUNDS = [
    ("parameter-server(mode=sync)", 0),
    ("parameter-server(mode=sync)", 1),
    ("parameter-server(mode=sync(backups=1))", 1),
    ("parameter-server(mode=sync,shards=2)", 0),
    ("parameter-server(mode=sync(backups=1),shards=2)", 1),
]


@pytest.mark.parametrize(
    ("algorithm", "restarts"),
    [
        *IN_ROUNDS,
        ("parameter-server(mode=sync,on_death=wait)", 1),
        ("parameter-server(mode=bounded(clock_bound=0))", 1),
        ("parameter-server(mode=bounded(clock_bound=2),shards=2)", 1),
    ],
)
def test_a_death_that_servers_notice_is_repeated(tmp_path, task, algorithm, restarts):
    named = "returning" if restarts else "dying"
    folder = trained(tmp_path / "run", f"{task}:{named}", algorithm, restarts=restarts)
    run = pl.RunData.load(folder)
    assert (len(run.result["workers_lost"]), run.result["restarts"]) == (1, restarts)
    assert max(rows["incarnation"].max() for rows in run.records.values()) == restarts
    assert pl.RecordedRun(folder).replay().checkpoint is not None


@pytest.mark.parametrize(("algorithm", "restarts"), IN_ROUNDS)
def test_a_killed_workers_gradient_without_a_record_is_repeated(tmp_path, task, algorithm, restarts, monkeypatch):
    """It dies once the servers have answered, before it has recorded that."""
    point = "order.unwritten@1#20" if "shards=2" in algorithm else "ring.unwritten@1#4"
    monkeypatch.setenv("PACELINE_FAIL_POINT", point)
    folder = trained(tmp_path / "run", f"{task}:steady", algorithm, restarts=restarts)
    run = pl.RunData.load(folder)
    recorded = sum(int((rows["applied_version"] > 0).sum()) for rows in run.records.values())
    assert run.result["workers_lost"] == [1]
    if "backups" not in algorithm:
        assert run.result["shards"][0]["held"] == recorded + 1
    replayed = pl.RecordedRun(folder).replay()
    assert replayed.checkpoint is not None
    steps = sum(map(len, run.records.values()))
    assert replayed.steps == steps + run.result["shards"][0]["held"] - recorded


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        ("leashed", "returning"),
        ("parameter-server(mode=async,shards=2)", "returning"),
        ("parameter-server(mode=sync)", "returning"),
        ("downpour(push=2,fetch=2)", "returning"),
        ("ad-psgd", "dying"),
        *soaked(
            ("locked", "returning"),
            ("parameter-server(mode=bounded(clock_bound=1))", "returning"),
            ("ad-psgd", "returning"),
        ),
    ],
)
def test_a_worker_that_was_replaced_after_the_run_was_resumed_is_repeated(tmp_path, task, algorithm, kind):
    for name in ("killed", "back"):
        (tmp_path / name).touch()
    folder = trained(tmp_path / "run", f"{task}:{kind}", algorithm)
    for name in ("killed", "back"):
        (tmp_path / name).unlink()
    config = pl.TrainConfig(task=f"{task}:{kind}", algorithm=algorithm, workers=3, momentum=0.9, epochs=6, restarts=1)
    result = pl.train(config, resume=folder).result
    assert (len(result["workers_lost"]), result["restarts"]) == (1, 1)
    assert result["replayable"], result["replayable_reason"]
    assert pl.RecordedRun(folder).replay().checkpoint is not None


@pytest.mark.parametrize("calls", [5, 6, 9])
def test_what_a_killed_worker_fetched_after_its_last_push_is_left_out(tmp_path, task, calls):
    task.write_text(TASK.replace("CALLS = 12", f"CALLS = {calls}"))
    folder = trained(tmp_path / "run", f"{task}:dying", "downpour(push=3,fetch=2,shards=2)")
    assert pl.RecordedRun(folder).replay().checkpoint is not None


def test_others_go_on_after_a_death_that_held_them_up(tmp_path, task):
    folder = trained(tmp_path / "run", f"{task}:dying", "parameter-server(mode=bounded(clock_bound=1))")
    assert len(pl.RunData.load(folder).result["workers_lost"]) == 1
    assert pl.RecordedRun(folder).replay().checkpoint is not None


def test_workers_draw_other_numbers_from_numpy(tmp_path, task):
    trained(tmp_path / "run", f"{task}:drawing", "lockstep")
    drawn = [path.read_text().split() for path in tmp_path.glob("drawn-*")]
    workers = [one for one in drawn if len(one) in (8, 16)]
    assert len(workers) >= 3
    assert len({number for one in workers for number in one}) == sum(map(len, workers))


RUNS = 20
LOCKSTEP = ["lockstep", "all-reduce", "local-sgd(period=4)", "da-sgd", "diloco(period=4,outer=nesterov)", "d-psgd"]
SURVIVES = {  # where workers are killed, besides in a gradient
    **{one: ["ring.unwritten", "replicated.mid_write"] for one in LOCKSTEP},
    "all-reduce": ["lockstep.arrived"],
    "d-psgd": ["views.begun", "ring.unwritten"],
    "locked": ["lock.taken"],
    "leashed": ["slots.hazard_set", "slots.claimed"],
    "parameter-server(mode=sync)": ["ring.unwritten"],
    "parameter-server(mode=sync(backups=1),shards=2)": [],
    "parameter-server(mode=async)": [],
    "parameter-server(mode=async,shards=2)": [],
    "parameter-server(mode=bounded(clock_bound=1))": [],
    "parameter-server(mode=bounded(clock_bound=1),shards=2)": [],
    "parameter-server(mode=ringmaster)": [],
    "downpour": [],
    "downpour(push=3,fetch=2,shards=2)": [],
    "adaptive-revision(shards=2)": [],
    "ad-psgd": [],
}


@pytest.mark.soak
@pytest.mark.parametrize("algorithm", ["sequential", *SURVIVES])
def test_twenty_runs_are_repeated(tmp_path, algorithm, monkeypatch):
    """With two and three workers; in every other run, one is killed, and replaced in half of these."""
    draw, figures = random.Random(algorithm), dict.fromkeys(("runs", "deaths", "replaced", "updates", "equal"), 0)
    points = ["a gradient", *SURVIVES.get(algorithm, [])]
    for number in range(RUNS):
        workers = 1 if algorithm == "sequential" else 2 + number // 2 % 2
        is_killed, is_replaced = algorithm in SURVIVES and number % 2 == 1, number // 4 % 2 == 1
        point, step = draw.choice(points), draw.randrange(2, 20)
        path = tmp_path / str(number)
        path.mkdir()
        script, kind = path / "signs.py", "steady"
        script.write_text(TASK.replace("CALLS = 12", f"CALLS = {step}"))
        if is_killed and point == "a gradient":
            kind = ("slow" if algorithm in LOCKSTEP else "returning") if is_replaced else "dying"
        elif is_killed:
            monkeypatch.setenv("PACELINE_FAIL_POINT", f"{point}@{workers - 1}#{step}")
        momentum = None if algorithm.startswith(("adaptive", "downpour")) else 0.9
        config = pl.TrainConfig(
            task=f"{script}:{kind}", algorithm=algorithm, workers=workers, momentum=momentum, restarts=int(is_replaced)
        )
        run = pl.train(config, out=path / "run")
        while (
            is_killed and algorithm not in LOCKSTEP and not run.result["workers_lost"]
        ):  # the others left it too few steps
            shutil.rmtree(path / "run")
            run = pl.train(config, out=path / "run")
        monkeypatch.delenv("PACELINE_FAIL_POINT", raising=False)
        assert len(run.result["workers_lost"]) == is_killed, point
        assert run.result["replayable"], (point, step, run.result["replayable_reason"])
        replayed = pl.RecordedRun(path / "run").replay()
        last = max(int(rows["incarnation"].max(initial=0)) for rows in run.records.values())
        new = (1, int(is_killed), last, replayed.updates, replayed.checkpoint is not None)
        figures = {name: before + int(more) for (name, before), more in zip(figures.items(), new, strict=True)}
        shutil.rmtree(path)
    assert figures["equal"] == RUNS
    soak_results.keep("soak_replays", algorithm, figures)
