"""The same seed gives the same files, byte for byte."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import paceline as pl
from forked import AGAINST_HANGS_S
from paceline.cli.app import app
from paceline.simulator import Cluster, Normal

LEASHED = "--algorithm leashed(backoff=exponential) --workers 4 --slow 0:10 --steps 20 --optimizer adam --json"
GOSSIP = "--algorithm ad-psgd(topology=complete) --workers 5 --slow 0:10 --slow-link 1-2:20 --steps 20 --json"
TWO_COMMANDS = """
import sys
from typer.testing import CliRunner
from paceline.cli.app import app

for line in sys.stdin.read().splitlines():
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, done.output
    print(done.stdout.splitlines()[-1])
"""


def simulate(folder, words, seed):
    """The result, as the command prints it."""
    done = CliRunner().invoke(app, ["simulate", *words.split(), "--seed", str(seed), "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Both commands in a process with another hash seed: their folders, and what they printed."""
    folders = [tmp_path_factory.mktemp("run") / name for name in ("leashed", "gossip")]
    lines = [
        f"simulate {words} --seed 1 --out {folder}" for folder, words in zip(folders, (LEASHED, GOSSIP), strict=True)
    ]
    printed = subprocess.run(
        [sys.executable, "-c", TWO_COMMANDS],
        input="\n".join(lines),
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=AGAINST_HANGS_S,
    ).stdout.splitlines()
    return dict(zip((LEASHED, GOSSIP), zip(folders, printed, strict=True), strict=True))


def files(folder):
    """What must be equal; the report shows the command, and so the folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("host.json", "report.html")}


@pytest.mark.parametrize("words", [LEASHED, GOSSIP], ids=["leashed", "ad-psgd"])
def test_a_command_twice_and_under_another_hash_seed(words, elsewhere, tmp_path):
    folder, printed = elsewhere[words]
    here = simulate(tmp_path / "here", words, seed=1)
    assert json.loads(here) == json.loads((tmp_path / "here" / "result.json").read_text())
    assert here == printed != simulate(tmp_path / "other", words, seed=2)
    first, again, other = files(folder), files(tmp_path / "here"), files(tmp_path / "other")
    assert sorted(first) == sorted(again)
    assert [name for name in first if first[name] != again[name]] == []
    assert first["events-0.jsonl"] != other["events-0.jsonl"]
    assert (folder / "host.json").is_file()
    assert str(folder).encode() not in b"".join(first.values())
    slow_link = json.loads(first["config.json"])["cluster"].get("slow_link")
    assert slow_link == ({"1-2": 20.0} if words == GOSSIP else None)


@pytest.mark.parametrize(
    "algorithm", ["hogwild(reads=copy)", "locked(kind=rwlock)", "lockstep", "ad-psgd", "d-psgd", "local-sgd"]
)
def test_seeds(tmp_path, algorithm):
    cluster = Cluster(workers=3, compute_s=Normal())
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(3)  # the caller's random state plays no part
        config = pl.TrainConfig(algorithm=algorithm, steps=15, seed=seed)
        pl.simulate_task(config, cluster=cluster, out=tmp_path / name)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert files(tmp_path / "a")["events-0.jsonl"] != files(tmp_path / "c")["events-0.jsonl"]


def test_the_callers_state_is_left_alone():
    torch.manual_seed(4)
    expected = torch.rand(2)
    torch.manual_seed(4)
    pl.simulate_task(pl.TrainConfig(workers=2, steps=3))
    assert torch.rand(2).equal(expected)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "words",
    [
        "--slow 7:2",
        "--slow 0",
        "--slow-link 0-1",
        "--kill 1",
        "--kill 7:1",
        "--kill 1:0",
        "--restarts -1",
        "--slow-link 0-7:2",
        "--parameters 0",
        "--parameters 5",
        "--cluster none.toml",
    ],
)
def test_bad_input(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["simulate", *words.split()], prog_name="paceline")
    assert done.exit_code == 2, done.stderr
    assert done.stderr.startswith("paceline: ") or words == "--parameters 5"
    assert isinstance(done.exception, SystemExit), "not a traceback"
