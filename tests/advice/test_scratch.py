"""Short runs of a user's loop leave the user's files alone: scratch folders, and what is written elsewhere is refused."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from paceline.advice.advise import advise
from paceline.advice.answer import Candidate, Target
from paceline.advice.programs import LoopProgram
from paceline.advice.scratch import Confined, Scratch, WritesElsewhereError
from paceline.errors import PacelineError, UsageError

LOOP = """
import os
import numpy as np
import torch
from torch import save
import paceline as pl

ELSEWHERE = {elsewhere!r}

def train():
    data = torch.load("data/numbers.pt")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print("begins")
    with pl.attach(model, optimizer) as worker:
        for x in worker.batches(list(data)):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            worker.report(loss)
            {write}
    {at_the_end}
"""
SAVE = "torch.save(model.state_dict(), {!r})"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The user's working folder; what lies outside of temporary folders is elsewhere."""
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "checkpoints").mkdir()
    torch.save(torch.ones(40, 3, 2), home / "data" / "numbers.pt")
    for name in ("model.pt", "checkpoints/best.pt"):
        (home / name).write_text("the user's")
    (home / "log.txt").write_text("first\n")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(home)
    return home


def program(home, write="pass", at_the_end="pass", **options):
    (home / "train.py").write_text(LOOP.format(elsewhere=str(home), write=write, at_the_end=at_the_end))
    folder = home.parent / "temporary" / "scratch"
    folder.mkdir(exist_ok=True)
    return LoopProgram("train.py:train", Scratch(folder, home, home.parent / "prints.log", **options))


def unchanged(home):
    assert (home / "model.pt").read_text() == (home / "checkpoints" / "best.pt").read_text() == "the user's"
    assert (home / "log.txt").read_text() == "first\n"
    names = {path.name for path in home.iterdir()} - {"__pycache__"}  # Python's own, of train.py
    assert names == {"checkpoints", "data", "log.txt", "model.pt", "train.py"}
    assert not list((home.parent / "temporary" / "scratch").iterdir()), "scratch folders are removed"


RELATIVE = [
    SAVE.format("model.pt"),
    SAVE.format("checkpoints/best.pt"),
    SAVE.format("checkpoints/new.pt"),
    "open('log.txt', 'a').write(str(len(open('log.txt').read())))",
    "np.save('new.npy', np.ones(2))",
    "os.makedirs('made/here', exist_ok=True)",
    "os.replace('model.pt', 'moved.pt') if os.path.exists('model.pt') else None",
    "os.remove('model.pt') if os.path.exists('model.pt') else None",
]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("write", RELATIVE)
def test_what_is_written_at_relative_paths_is_scratch(home, write):
    one = program(home, write)
    assert one.shape().batch_size == 3
    unchanged(home)
    assert (home.parent / "prints.log").read_text() == "begins\n"


def test_what_is_appended_to_is_a_copy(home):
    one = program(home, at_the_end="open('log.txt', 'a').close(); assert os.path.getsize('log.txt') == 6")
    target = Target(loss=1e-9)
    from paceline.simulator import Cluster

    run = one.simulate(
        Candidate(algorithm="hogwild", workers=2), Cluster(workers=2), target, limit_s=1e9, limit_samples=10**6, seed=0
    )
    assert run.outcome == "stopped"
    unchanged(home)


ABSOLUTE = [
    "save(model.state_dict(), ELSEWHERE + '/model.pt')",
    "torch.save(model.state_dict(), ELSEWHERE + '/model.pt')",
    "open(ELSEWHERE + '/new.txt', 'w')",
    "os.makedirs(ELSEWHERE + '/made')",
    "os.replace('model.pt', ELSEWHERE + '/log.txt')",
    "os.remove(ELSEWHERE + '/log.txt')",
    "np.save(ELSEWHERE + '/new.npy', np.ones(2))",
]


@pytest.mark.parametrize("write", ABSOLUTE)
def test_what_is_written_at_absolute_paths_is_refused(home, write):
    with pytest.raises(WritesElsewhereError, match=rf"^The loop writes {home}/.* allow that with --yes"):
        program(home, write).shape()
    unchanged(home)


def test_unless_it_is_allowed(home):
    program(home, ABSOLUTE[1], writes_elsewhere=True).shape()
    assert torch.load(home / "model.pt").keys() == {"weight", "bias"}


def test_temporary_folders_and_devices_are_free(home):
    write = "import tempfile; tempfile.mkdtemp(); open('/dev/null', 'w').close()"
    assert program(home, write).shape().batch_size == 3


def test_advice_says_it_before_anything_runs(home, monkeypatch):
    program(home, ABSOLUTE[1])
    monkeypatch.setattr(LoopProgram, "run", lambda *_, **__: pytest.fail("a short run began"))
    with pytest.raises(UsageError, match=r"The loop writes .*model\.pt, which is outside the scratch folder"):
        advise("train.py:train", target=Target(loss=0.1), max_workers=2, budget_s=60, processes=0)
    assert (home / "model.pt").read_text() == "the user's"


def test_the_first_step_is_made_in_another_process(home, monkeypatch):
    def fails(*_, **__):
        raise PacelineError("no short run")

    program(home, "print(os.getpid())")
    monkeypatch.setattr(LoopProgram, "run", fails)
    log = home.parent / "prints.log"
    with pytest.raises(UsageError, match="No algorithm could be run here: no short run"):
        advise("train.py:train", target=Target(loss=0.1), max_workers=2, budget_s=60, processes=1, log=log)
    assert set(log.read_text().split()).isdisjoint({str(os.getpid())})
    assert log.read_text().startswith("begins\n")


def test_nothing_is_guarded_afterwards(home):
    program(home).shape()
    before = Path.cwd()
    (home / "free.txt").write_text("x")
    torch.save({}, home / "free.pt")
    assert Path.cwd() == before


def test_worker_processes_are_confined_too(home):
    """What a short run sends to its workers, called as they do."""
    one = program(home, at_the_end=ABSOLUTE[1])
    with one.scratch.made() as own:
        loop = pickle.loads(pickle.dumps(Confined(one.function(), one.scratch, own)))
        with pytest.raises(WritesElsewhereError):
            loop()
    unchanged(home)
    assert loop.__name__ == "train"


def test_a_link_in_a_loop_stays_one(home):
    (home / "loop").symlink_to("loop")
    with program(home).scratch.made() as own:
        assert (own / "loop").is_symlink()


def test_large_folders_are_one_link(home, monkeypatch):
    monkeypatch.setattr("paceline.advice.scratch._MOST_ENTRIES", 1)
    (home / "checkpoints" / "second.pt").touch()
    one = program(home, "open('checkpoints/new.txt', 'w')")
    with one.scratch.made() as own:
        assert (own / "checkpoints").is_symlink()
        assert not (own / "data").is_symlink()
    with pytest.raises(WritesElsewhereError, match=r"checkpoints/new\.txt"):
        one.shape()
