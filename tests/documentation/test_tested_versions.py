"""`.ci/run` fails if a file that depends on PyTorch's release was committed after the table of tested versions."""

import os
import runpy
import subprocess
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "test_versions.py"))
TABLE, WATCHED = SCRIPT["TABLE"], SCRIPT["WATCHED"]


@pytest.fixture
def commit(tmp_path):
    """Commits a file with a date, in minutes."""

    def git(*words, **environment):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, env={**os.environ, **environment})

    def commit_file(path, text, minute):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        git("add", path)
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        git(*names, "commit", "--quiet", "-m", path, GIT_COMMITTER_DATE=f"2026-11-28T01:{minute:02}:00Z")

    git("init", "--quiet")
    return commit_file


def test_a_watched_file_that_changed_after_the_rows_is_named(commit, tmp_path):
    for path in WATCHED:
        commit(path, "1", 0)
    assert SCRIPT["changed_later"](tmp_path) == WATCHED
    commit(TABLE, "| 3.11-newest | quick | 7 |\n", 1)
    assert SCRIPT["changed_later"](tmp_path) == []
    commit(WATCHED[1], "2", 2)
    assert SCRIPT["changed_later"](tmp_path) == WATCHED[1:]
    commit(TABLE, "| 3.11-newest | quick | 8 |\n", 2)
    assert SCRIPT["changed_later"](tmp_path) == []


def test_other_words_on_the_page_do_not_count(commit, tmp_path):
    commit(TABLE, "| 3.11-newest | quick | 7 |\n", 0)
    commit(WATCHED[0], "1", 1)
    commit(TABLE, "Words.\n\n| 3.11-newest | quick | 7 |\n", 2)
    assert SCRIPT["changed_later"](tmp_path) == WATCHED[:1]


@pytest.mark.parametrize("late", [[], WATCHED])
def test_the_check_fails_if_a_file_changed_later(late, monkeypatch, capsys):
    monkeypatch.setitem(SCRIPT["main"].__globals__, "changed_later", lambda root: late)
    assert SCRIPT["main"](["--check"]) == bool(late)
    assert all(path in capsys.readouterr().err for path in late[:1])


def test_the_watched_files_exist():
    assert all((SCRIPT["ROOT"] / path).exists() for path in WATCHED)


def test_the_page_has_a_row_for_each_group_of_each_environment():
    rows = (SCRIPT["ROOT"] / TABLE).read_text().splitlines()
    starts = [f"| {environment} | {group} | " for environment in SCRIPT["ENVIRONMENTS"] for group in SCRIPT["TESTS"]]
    assert [sum(row.startswith(start) for row in rows) for start in starts] == [1] * len(starts)
