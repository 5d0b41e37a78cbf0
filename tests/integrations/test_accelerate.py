"""Loops with Accelerate, the real package, under our launchers."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import paceline as pl
from forked import AGAINST_HANGS_S
from paceline.membership.environment import current_environment

pytest.importorskip("accelerate", reason="needs pip install accelerate")
from integrations import accelerate_programs as programs

pytestmark = pytest.mark.filterwarnings("default")
PROGRAM = Path(programs.__file__)
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def told(folder):
    return [torch.load(path) for path in sorted(folder.glob("?.pt"))]


def paceline_launch(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "paceline", "launch", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        timeout=AGAINST_HANGS_S,
    )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_worker_is_the_plain_loop_bit_for_bit(accumulation):
    _, found, accuracy = programs.attached(accumulation)
    assert torch.equal(found, programs.plain(accumulation))
    assert accuracy > 0.5


@pytest.mark.parametrize("algorithm", ["all-reduce", "ad-psgd", "hogwild"])
def test_functions_that_are_launched_learn(algorithm, tmp_path):
    run = pl.launch(partial(programs.learn, str(tmp_path), algorithm), workers=2)
    first, second = told(tmp_path)
    assert run.result["outcome"] == "stopped"
    assert torch.equal(first["x"], second["x"])
    assert first["accuracy"] > 0.8


@pytest.mark.parametrize(("workers", "steps"), [(1, 16), (2, 8)])
def test_accumulation_makes_a_step_with_the_last_batch(workers, steps, tmp_path):
    pl.launch(partial(programs.count_steps, str(tmp_path)), workers=workers, algorithm="all-reduce")
    found = told(tmp_path)
    assert [one["steps"] for one in found] == [steps] * workers
    expected = programs.plain(5, epochs=2, batch_size=40 * workers, shuffle=False)
    for one in found:
        torch.testing.assert_close(one["x"], expected, rtol=1e-4, atol=1e-5)


def test_a_script_under_paceline_launch_learns(tmp_path):
    done = paceline_launch(
        "--workers", "2", "--algorithm", "ad-psgd", "--out", tmp_path / "run", "--", PROGRAM, tmp_path
    )
    assert done.returncode == 0, done.stderr
    first, second = told(tmp_path)
    assert torch.equal(first["x"], second["x"])
    assert first["accuracy"] > 0.8


def test_two_launchers_at_once_are_one_sentence(monkeypatch):
    """By the variables that they set; an Accelerator of a single process is no launcher's."""
    monkeypatch.setenv("PACELINE_JOIN", "127.0.0.1:1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert current_environment() is not None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pl.UsageError, match=r"leave accelerate launch out, as in `paceline launch -- SCRIPT.py`"):
        current_environment()


def test_the_page_shows_this_loop():
    """Each line that the page adds to a loop is one of the program's."""
    section = PAGE.read_text().partition("\n## Accelerate\n")[2].partition("\n## ")[0]
    added = re.findall(r"^\+ *(.+)$", section, flags=re.MULTILINE)
    assert len(added) == 2
    text = " ".join(PROGRAM.read_text().split())
    assert "pl.attach(model, optimizer" in added[0]
    assert "with pl.attach(model, optimizer" in text
    assert "worker.batches(loader)" in added[1]
    assert "worker.batches(loader)" in text
