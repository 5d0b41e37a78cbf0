"""A loop with `attach` in a TorchTrainer of Ray's, the real package: what torchrun's workers come to, bit for bit."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from forked import AGAINST_HANGS_S

pytest.importorskip("ray.train", reason="needs pip install 'ray[train]'")
from integrations import ray_programs as programs

PROGRAM = Path(programs.__file__)
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def run(*words, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=2 * AGAINST_HANGS_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def told(folder):
    return [torch.load(folder / f"{worker}.pt") for worker in range(programs.WORKERS)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of all trainings. Ray's own files are elsewhere: the names of its sockets may have 107 characters."""
    folder = tmp_path_factory.mktemp("ray")
    with tempfile.TemporaryDirectory(prefix="ray") as own:
        run(PROGRAM, folder, RAY_TMPDIR=own, HOME=own, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    return folder


@pytest.mark.parametrize("name", ["all-reduce", "local-sgd"])
def test_lockstep_is_torchruns_bit_for_bit(name, trained, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={programs.WORKERS}"]
    run(*launcher, PROGRAM, tmp_path, programs.TRAININGS[name]["algorithm"])
    in_ray, by_torchrun = told(trained / name), told(tmp_path)
    assert [one["workers"] for one in in_ray] == [programs.WORKERS] * programs.WORKERS
    assert [one["steps"] for one in in_ray] == [one["steps"] for one in by_torchrun]
    for one in (*in_ray, *by_torchrun):
        assert torch.equal(one["x"], in_ray[0]["x"])
    assert in_ray[0]["accuracy"] > 0.8


def test_two_methods_come_to_two_models(trained):
    """So that equal ones say something."""
    assert not torch.equal(told(trained / "all-reduce")[0]["x"], told(trained / "local-sgd")[0]["x"])


def test_gossip_learns_and_ends_with_one_model(trained):
    first, second = told(trained / "ad-psgd")
    assert torch.equal(first["x"], second["x"])
    assert first["accuracy"] > 0.8


def test_workers_that_ray_starts_again_go_on_from_the_newest_checkpoint(trained):
    """Worker 1 was killed in the third epoch; of the second life there is this epoch alone."""
    undisturbed, killed = told(trained / "all-reduce"), told(trained / "killed")
    assert all(torch.equal(one["x"], undisturbed[0]["x"]) for one in killed)
    assert [3 * one["steps"] for one in killed] == [one["steps"] for one in undisturbed]


def test_the_page_shows_this_loop():
    """Each line that the page adds to a loop is one of the program's, but for names."""
    section = PAGE.read_text().partition("\n## Ray Train\n")[2].partition("\n## ")[0]
    added = re.findall(r"^\+ *(.+)$", section, flags=re.MULTILINE)
    assert len(added) == 2
    text = PROGRAM.read_text()
    assert "with pl.attach(model, optimizer, " in added[0]
    assert "with pl.attach(model, optimizer, " in text
    assert "worker.batches(loader)" in added[1]
    assert "worker.batches(loader)" in text
