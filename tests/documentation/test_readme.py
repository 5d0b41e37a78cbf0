"""Every code block of the README does what the README says; it is a door, and no manual."""

import re

import pytest

from .conftest import ROOT
from .snippets import blocks, masked, python_blocks, run_python, run_session, sessions

TEXT = (ROOT / "README.md").read_text()
SESSIONS = sessions(TEXT)
FIRST = next(command for command, _ in SESSIONS if command.startswith("paceline "))
KINDS = {"console", "diff", "python"}


def test_masked():
    assert masked("training time   0.284 s\n\nper worker 619, 1,181") == ["training time #", "per worker # #"]


@pytest.mark.parametrize(("command", "output"), SESSIONS, ids=[command[:50] for command, _ in SESSIONS])
def test_console(command, output, shell):
    run_session(command, output, shell, anew=command == FIRST)


def test_python(shell):
    ((code, _),) = python_blocks(TEXT)
    run_python(code, shell)


def test_it_is_read_in_a_minute():
    assert len(TEXT.splitlines()) <= 150
    assert set(re.findall(r"^```(\w+)$", TEXT, re.MULTILINE)) == KINDS
    assert len(blocks(TEXT, "diff")) == 1
    assert TEXT.count("<picture>") == 1


def test_links_exist():
    for target in re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", TEXT):
        path = "".join(target)
        assert path.startswith("https://") or (ROOT / path.partition("#")[0]).exists(), path
