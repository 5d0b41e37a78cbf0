"""A study's files are checked as they are read: one sentence names the damaged one, and what to do."""

import json
import re
import subprocess

import pytest

from paceline.errors import UsageError
from paceline.study.runner import run_study
from paceline.study.table import load_table


@pytest.fixture
def folder(timed, tmp_path):
    run_study(timed(), tmp_path)
    return tmp_path


def first(folder, name):
    return sorted((folder / "trials").glob(f"*/{name}"))[0]


def test_a_digit_of_a_trial_that_has_changed(folder):
    path = first(folder, "result.json")
    path.write_text(re.sub(r'"steps": (\d)', lambda found: f'"steps": {9 - int(found[1])}', path.read_text(), count=1))
    with pytest.raises(UsageError, match=r"result\.json is damaged \(its checksum does not match SHA256SUMS\); remove"):
        load_table(folder)


def test_the_checksums_are_those_of_sha256sum(folder):
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=first(folder, "SHA256SUMS").parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert "trial.json: OK" in checked.stdout


def test_a_trial_of_before_checksums_is_read(folder):
    before = load_table(folder)
    first(folder, "SHA256SUMS").unlink()
    assert load_table(folder).equals(before)


WRONG = [
    ("plan.json", "{}"),
    ("plan.json", "[3]"),
    ("plan.json", '[{"hash": "../..", "factors": {}}]'),
    ("plan.json", '[{"hash": "ab", "factors": {"workers": [1]}}]'),
    ("plan.json", "["),
    ("study.toml", "name"),
    ("study.toml", "targets = 300"),
    ("study.toml", "targets = ['a']"),
    ("study.toml", "targets = [50.0]\ntarget = 10.0"),
]


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_what_no_study_writes(name, text, folder):
    (folder / name).write_text(text)
    with pytest.raises(UsageError, match=name):
        load_table(folder)


@pytest.mark.parametrize("name", ["table.parquet", "table.csv"])
def test_a_damaged_table_without_trials(name, folder):
    (folder / "plan.json").unlink()
    for one in {"table.parquet", "table.csv"} - {name}:
        (folder / one).unlink()
    (folder / name).write_bytes(b"\x00\xff")
    with pytest.raises(UsageError, match=rf"{name} is damaged .*, and the trials to write it again are missing"):
        load_table(folder)


def test_a_trial_that_holds_no_names(folder):
    path = first(folder, "trial.json")
    path.with_name("SHA256SUMS").unlink()
    path.write_text(json.dumps([1]))
    with pytest.raises(UsageError, match=r"trial\.json is damaged \(it is not an object of names and values\)"):
        load_table(folder)
