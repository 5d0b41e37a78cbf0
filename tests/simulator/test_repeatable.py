"""The same seed gives the same files, byte for byte."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import paceline as pl
from paceline.cli.app import app
from paceline.simulator import Cluster, Normal


def simulate(folder, *words, hash_seed="0"):
    code = "from paceline.cli.app import main; main()"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", code, "simulate", *words, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def files(folder):
    """What must be equal; the report shows the command, and so the folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("host.json", "report.html")}


def test_command_twice_and_under_another_hash_seed(tmp_path):
    words = "--algorithm leashed(backoff=exponential) --workers 4 --slow 0:10 --steps 20 --optimizer adam"
    done = simulate(tmp_path / "a", *words.split(), "--seed", "1", "--json")
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads((tmp_path / "a" / "result.json").read_text())
    simulate(tmp_path / "b", *words.split(), "--seed", "1", hash_seed="12345")
    first, again = files(tmp_path / "a"), files(tmp_path / "b")
    assert sorted(first) == sorted(again)
    assert [name for name in first if first[name] != again[name]] == []
    assert (tmp_path / "a" / "host.json").is_file()
    assert str(tmp_path).encode() not in b"".join(first.values())


def test_gossip_twice_and_under_another_hash_seed(tmp_path):
    words = [
        "--algorithm",
        "ad-psgd(topology=complete)",
        "--workers",
        "5",
        "--slow",
        "0:10",
        "--slow-link",
        "1-2:20",
        "--steps",
        "20",
        "--json",
    ]
    lines = [
        simulate(tmp_path / name, *words, "--seed", seed, hash_seed=hash_seed).stdout.splitlines()[-1]
        for name, seed, hash_seed in (("a", "1", "0"), ("b", "1", "12345"), ("c", "2", "0"))
    ]
    assert lines[0] == lines[1] != lines[2]
    first, again, other = (files(tmp_path / name) for name in "abc")
    assert sorted(first) == sorted(again)
    assert [name for name in first if first[name] != again[name]] == []
    assert first["events-0.jsonl"] != other["events-0.jsonl"]
    assert json.loads(first["config.json"])["cluster"]["slow_link"] == {"1-2": 20.0}


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
