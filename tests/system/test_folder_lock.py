"""A folder has one writer at a time, in every verb and function; a second is told which was first."""

import os
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

import paceline as pl
from paceline.cli import options
from paceline.cli.app import app
from paceline.run.launch_script import Agent
from paceline.study.runner import run_study
from paceline.study.study_file import Limits, Study
from paceline.system.folder_lock import is_empty, locked, locked_for_reading, run_folder

SHORT = pl.TrainConfig(workers=1, steps=5, backend="threads")


def test_the_second_writer_is_told_which_was_first(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["paceline", "train", "--seed", "3"])
    folder = tmp_path / "run"
    with locked(folder), pytest.raises(pl.UsageError) as raised, locked(folder):
        pass
    text = str(raised.value)
    assert text.startswith(f"{folder} is in use by process {os.getpid()} on ")
    assert "(paceline train --seed 3): wait for it or end it, or choose another folder." in text
    assert "\n" not in text


def test_what_a_folder_is_left_as(tmp_path):
    with locked(tmp_path / "a" / "made"):
        assert is_empty(tmp_path / "a" / "made")
    assert not (tmp_path / "a").exists(), "nothing came into it"
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / ".report.html.77.tmp").touch()  # of a killed process
    with locked(tmp_path / "there"):
        (tmp_path / "there" / "config.json").touch()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["config.json"]
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "failed"):
        raise ZeroDivisionError
    assert not (tmp_path / "failed").exists()


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path):
    script = "import sys, time; from pathlib import Path; from paceline.system.folder_lock import locked\n"
    script += "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(pl.UsageError, match=f"in use by process {process.pid} on"), locked(tmp_path):
            pass
    finally:
        process.kill()
        process.communicate()
    with locked(tmp_path):
        pass


def test_a_hundred_at_once_are_one_at_a_time(tmp_path):
    """The lock's file is removed and made again between them, which must let no two in."""
    inside, seen, entered = [], [], []

    def go():
        while len(entered) < 100:
            try:
                with locked(tmp_path / "run"):
                    inside.append(1)
                    seen.append(len(inside))
                    entered.append(1)
                    inside.pop()
            except pl.UsageError:
                continue

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {1}


def test_readers_share_and_writers_do_not(tmp_path):
    (tmp_path / "config.json").touch()
    in_use = pytest.raises(pl.UsageError, match="in use by")
    with locked_for_reading(tmp_path), locked_for_reading(tmp_path), in_use, locked(tmp_path):
        pass
    with locked(tmp_path), pytest.raises(pl.UsageError, match="in use by process"), locked_for_reading(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_what_a_run_may_be_written_into(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").touch()
    not_empty = pytest.raises(pl.UsageError, match=r"old is not empty: choose another `out`, or continue that run with")
    with not_empty, run_folder(tmp_path / "old"):
        pass
    with run_folder(tmp_path / "old", tmp_path / "old"), run_folder(None):
        pass
    no_run = pytest.raises(pl.UsageError, match="is not the folder of a run")
    with no_run, run_folder(tmp_path / "new", tmp_path / "nowhere"):
        pass
    assert not (tmp_path / "nowhere").exists()
    in_use = pytest.raises(pl.UsageError, match="old is in use")
    with run_folder(tmp_path / "new", tmp_path / "old"), in_use, run_folder(tmp_path / "old", tmp_path / "old"):
        pass


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(pl.UsageError, match=r"file/run cannot be made \(Not a directory\)"),
        locked(tmp_path / "file" / "run"),
    ):
        pass


def test_default_names_of_the_same_instant_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-120000")
    with options.out_folder(None, "a") as first, options.out_folder(None, "a") as second:
        assert (first.name, second.name) == ("a-20260101-120000", "a-20260101-120000-2")
        (first / "config.json").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [first.name]
    (first / "config.json").unlink()


# Every verb and function that writes a folder


def loop():
    raise AssertionError("the folder is somebody else's")


def train(folder):
    pl.train(SHORT, out=folder)


def launch(folder):
    pl.launch(loop, workers=1, backend="threads", out=folder)


def simulate(folder):
    pl.simulate(loop, workers=1, out=folder)


def simulate_task(folder):
    pl.simulate_task(SHORT, out=folder, timing_only=True)


def agent(folder):
    nobody = Agent(["script.py"], "127.0.0.1:1", 1, None, None, None, 0, 1, folder, print)
    nobody.run()


def study(folder):
    limits = Limits(steps=4)
    run_study(Study(name="s", backend="simulator", timing_only=True, parameters=10, limits=limits), folder)


@pytest.mark.parametrize("write", [train, launch, simulate, simulate_task, agent, study])
def test_a_second_writer_is_refused(write, tmp_path):
    with locked(tmp_path / "run"), pytest.raises(pl.UsageError, match="run is in use by process") as raised:
        write(tmp_path / "run")
    raised.value.__traceback__ = None
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    pl.train(SHORT, out=folder)
    return folder


@pytest.mark.parametrize(
    "resume",
    [
        lambda old, new: pl.train(SHORT, resume=old),
        lambda old, new: pl.train(SHORT, resume=old, out=new),
        lambda old, new: pl.launch(loop, workers=1, backend="threads", resume=old),
        lambda old, new: pl.launch(loop, workers=1, backend="threads", resume=old, out=new),
    ],
    ids=["train", "train elsewhere", "launch", "launch elsewhere"],
)
def test_a_run_that_is_written_is_not_resumed(resume, finished, tmp_path):
    before = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    with locked(finished):
        with pytest.raises(pl.UsageError, match="run is in use by process") as raised:
            resume(finished, tmp_path / "new")
        raised.value.__traceback__ = None
    assert {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()} == before
    assert not (tmp_path / "new").exists()


def test_two_resumes_at_once(finished):
    """The second comes while the first trains: once, both went on, and the versions of both were in the records."""
    refused = []

    def second(progress):
        if not refused:
            with pytest.raises(pl.UsageError, match="is in use by process") as raised:
                pl.train(SHORT, resume=finished)
            raised.value.__traceback__ = None
            refused.append(str(raised.value))

    config = pl.TrainConfig(workers=1, steps=2000, backend="threads")
    run = pl.train(config, resume=finished, on_progress=second)
    assert refused
    assert run.records[0]["applied_version"].tolist() == list(range(1, 2001))


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--steps", "5", "--workers", "1", "--backend", "threads"],
        ["compare", "--algorithm", "hogwild", "--steps", "5", "--backend", "threads"],
        ["simulate", "--steps", "5", "--timing-only"],
        ["advise", "digits-mlp", "--target-loss", "0.1", "--budget", "1s"],
        ["study", "run", "--steps", "5", "--backend", "simulator", "--seeds", "1"],
        ["launch", "loop.py:loop"],
        ["launch", "--", "loop.py"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_verb_says_so_in_one_sentence(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text("def loop():\n    raise AssertionError\n")
    place = words.index("--") if "--" in words else len(words)
    with locked(tmp_path / "run"):
        result = CliRunner().invoke(app, [*words[:place], "--out", "run", *words[place:]], prog_name="paceline")
    assert result.exit_code == 2, result.output
    complaint = result.stderr.splitlines()[-1]
    assert complaint.startswith("paceline: run is in use by process"), result.stderr
    assert "Traceback" not in result.output
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"loop.py"}  # less Python's own
