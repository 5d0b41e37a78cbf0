"""A study that is killed at any instant has every trial that was complete, and runs none of them again."""

import itertools
import os
import pathlib
import signal

import pytest

from paceline.study import runner
from paceline.study.runner import run_study
from paceline.study.table import load_table

CALLS = [(pathlib.Path, "replace"), (pathlib.Path, "rename"), (pathlib.Path, "mkdir"), (os, "fsync")]


def killed(study, path, log, at_call):
    """Runs the study in a process of its own, which is killed just before its `at_call`-th change of the folder."""
    pid = os.fork()
    if pid == 0:
        try:
            count = itertools.count(1)
            for owner, name in CALLS:
                setattr(owner, name, until(getattr(owner, name), count, at_call))
            logging(log)
            run_study(study, path)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def until(function, count, at_call):
    def call(*arguments, **named):
        if next(count) == at_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    return call


def logging(log):
    """Every run of a trial leaves a line, whatever becomes of it."""
    original = runner._run

    def run(trial):
        with log.open("a") as file:
            file.write(f"{trial.hash}\n")
        return original(trial)

    runner._run = run


def complete(path):
    return {one.name for one in (path / "trials").glob("[0-9a-f]*")} if path.exists() else set()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("first", range(1, 40, 5))
def test_killed_twice_and_resumed(timed, tmp_path, first, monkeypatch):
    study, path, log = timed(), tmp_path / "study", tmp_path / "log"
    for at_call in (first, first + 11):
        before = complete(path)
        ran_before = log.read_text().split() if log.exists() else []
        assert killed(study, path, log, at_call)
        ran = log.read_text().split()[len(ran_before) :] if log.exists() else []
        assert not before & set(ran)  # nothing that was complete is run again
        assert before <= complete(path)  # nor lost
        assert len(ran) - len(complete(path) - before) in (0, 1)  # at most the one under way
        assert len(load_table(path)) == len(complete(path)) if (path / "plan.json").exists() else True
    before = complete(path)
    monkeypatch.setattr(runner, "_run", runner._run)
    logging(log)
    end = run_study(study, path)
    assert (end.found, end.ran) == (len(before), 8 - len(before))
    assert not list((path / "trials").glob(".*"))
    assert len(load_table(path)) == 8
    ran = log.read_text().split()
    assert len(ran) <= 8 + 2
    assert len(set(ran)) == 8
