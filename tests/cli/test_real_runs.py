"""The command with real workers, as a user's shell would start it."""

import json

import pytest

import forked

pytestmark = pytest.mark.usefixtures("nothing_left")


def paceline(*words, folder):
    return forked.run(["-m", "paceline", *words], folder)


def test_train_then_resume(tmp_path):
    first = paceline("train", "--epochs", "1", "--out", "run", "--json", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["outcome"] == "stopped"
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "run" / "trace.json").is_file()
    again = paceline("train", "--resume", "run", "--epochs", "2", "--json", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["steps"] > result["steps"]
    refused = paceline("train", "--out", "run", folder=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--resume run" in refused.stderr


LOOP = """
from pathlib import Path

import torch
import paceline as pl

def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(8, 4) for _ in range(40)]
    with pl.attach(model, optimizer) as worker:
        for epoch in range(int(Path("epochs").read_text())):
            for x in worker.batches(batches):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

if __name__ == "__main__":
    pl.launch(train, workers=3, algorithm="leashed", out="run", slow={1: 2.0})
"""


def test_launch_then_resume_with_what_the_run_was_told(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "epochs").write_text("2")
    first = forked.run(["loop.py"], tmp_path)
    assert first.returncode == 0, first.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 80
    (tmp_path / "epochs").write_text("5")
    again = paceline("launch", "loop.py:train", "--resume", "run", "--json", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["steps"] == 200
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["workers"], config["algorithm"], config["slow"]) == (3, "leashed", {"1": 2.0})


def test_compare(tmp_path):
    words = "compare --algorithm hogwild,sequential --epochs 1 --out here --json"
    done = paceline(*words.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [one["workers"] for one in json.loads(done.stdout)] == [2, 1]
    assert (tmp_path / "here" / "report.html").is_file()


def test_doctor_and_algorithms(tmp_path):
    examined = paceline("doctor", "--json", folder=tmp_path)
    assert examined.returncode == 0, examined.stdout
    names = [one["name"] for one in json.loads(paceline("algorithms", "--json", folder=tmp_path).stdout)]
    assert {"hogwild", "leashed", "sequential"} <= set(names)
