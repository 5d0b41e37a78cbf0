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
