"""`paceline study run` and `table`."""

import json

import pytest
from typer.testing import CliRunner

BASE = ["--backend", "simulator", "--timing-only", "--parameters", "1000", "--steps", "3", "--seeds", "2"]


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command line in an empty folder; the report is a colleague's."""
    written = []

    def write_report(folder):
        written.append(folder)
        return folder / "report.html"

    monkeypatch.setattr("paceline.study.report.write_report", write_report)
    monkeypatch.chdir(tmp_path)
    from paceline.cli.app import app

    def run(*words, expect=0):
        result = CliRunner().invoke(app, ["study", *map(str, words)], prog_name="paceline")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == expect, result.output
        return result

    run.reports = written
    return run


def test_the_comma_form(command, tmp_path):
    algorithms = "locked(kind=mutex),leashed(persistence=1, backoff=linear),hogwild"
    words = [
        "run",
        "--algorithm",
        algorithms,
        "--workers",
        "1,2",
        "--factor",
        "batch_size=8,16",
        *BASE,
        "--out",
        "here",
    ]
    result = command(*words, "--json")
    assert result.stdout.count("\n") == 1
    end = json.loads(result.stdout)
    assert (end["trials"], end["ran"], end["out"]) == (24, 24, "here")
    assert str(command.reports[0]) == "here"
    end = json.loads(command(*words, "--json").stdout)
    assert (end["ran"], end["found"]) == (0, 24)
    shown = command("table", "here", "--json")
    rows = json.loads(shown.stdout)
    assert {row["factor.algorithm"] for row in rows} == {
        "locked(kind=mutex)",
        "leashed(persistence=1, backoff=linear)",
        "hogwild",
    }
    assert "2 stopped" in shown.stderr


def test_options_replace_what_the_file_says(command, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'backend = "simulator"\ntiming_only = true\nparameters = 10\n[limits]\nepochs = 1\n[factors]\nworkers = [1, 2]\n'
        "[settings]\nbatch_size = 64\n"
    )
    end = json.loads(
        command("run", "mine.toml", "--workers", "4", "--batch-size", "32", "--steps", "2", "--json").stdout
    )
    assert (end["trials"], end["out"]) == (3, "runs/mine")
    (row, *_) = json.loads(command("table", "runs/mine", "--json").stdout)
    assert (row["factor.workers"], row["factor.batch_size"], row["computed_gradients"]) == (4, 32, 8)
    left = command("run", "mine.toml", "--workers", "2", "--batch-size", "32", "--steps", "2").stderr
    assert "3 earlier trials belong to the study no longer" in left


def test_a_dry_run_writes_nothing(command, tmp_path):
    result = command("run", "--algorithm", "hogwild,leashed", *BASE, "--out", "here", "--dry-run")
    assert "4 trials, 0 of them run before; 4 to run: about" in result.stdout
    assert "hogwild" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "hogwlid"], "Unknown algorithm 'hogwlid'. Did you mean 'hogwild'?"),
        (["--algorithm", "leashed(persistence=0"], "this '(' is never closed"),
        (["--workers", "1,,2"], "empty entry between commas"),
        (["--workers", "two"], "whole number"),
        (["--factor", "algorithm.persistence"], "write NAME=LEVEL,LEVEL"),
        (["--factor", "colour=red"], "unknown name 'colour'"),
        (["--targets", "150"], "between 0 and 100"),
        (["--seeds", "0"], "The number of seeds must be 1 or more"),
        (["--backend", "moon"], "backend of Study must be 'processes' or 'threads' or 'simulator', not 'moon'"),
        (["--timing-only"], 'add backend = "simulator"'),
        (["--epochs", "1", "--steps", "2"], "either epochs or steps"),
        (["nowhere.toml"], "nowhere.toml does not exist"),
        (["--task", "nothing"], "Unknown task 'nothing'"),
    ],
)
def test_bad_input_is_one_sentence_and_runs_nothing(command, tmp_path, words, message):
    result = command("run", *words, expect=2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_table_of_what_is_no_study(command, tmp_path):
    assert "holds no study" in command("table", tmp_path, expect=2).stderr
