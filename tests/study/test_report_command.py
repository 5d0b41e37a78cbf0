"""`paceline study report` and `compare`, over a table that was written down."""

import json
import re

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.study import compare, report
from paceline.errors import UsageError

from .made_up import make_table

app = typer.Typer()
app.command()(report)
app.command()(compare)


@pytest.fixture
def folder(tmp_path):
    make_table({"locked": 1.0, "leashed": 1.4}, workers=(1, 4), batch_sizes=(64,), seeds=8).to_csv(
        tmp_path / "table.csv", index=False
    )
    return tmp_path


def invoke(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, UsageError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_report_is_written_again(folder):
    said = invoke("report", folder)
    assert said.split() == ["Report:", str(folder / "report.html")]
    assert "leashed" in (folder / "report.html").read_text()


def test_a_comparison_is_a_table_and_json(folder):
    said = invoke("compare", folder, "--baseline", "locked", "--where", "workers=4", "--target", "5")
    assert "time to 5 % of the initial loss, locked as baseline" in " ".join(said.split())
    assert re.search(
        r"^leashed +locked +4 workers +1\.\d\dx +1\.\d\d to 1\.\d\d +8 +8 +0\.\d{3} *$", said, re.MULTILINE
    )
    (record,) = json.loads(invoke("compare", folder, "--where", "workers=4", "--json"))
    assert (record["base"], record["other"], record["finding"], record["pairs"]) == ("locked", "leashed", True, 8)
    assert re.search(r"^4 workers +1 worker +everywhere ", invoke("compare", folder, "--by", "workers"), re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--baseline", "mutex"], "No trial of this study has the baseline 'mutex'; choose one of: locked, leashed"),
        (["--by", "colour"], "no factor 'colour'; it has algorithm, workers, batch_size, learning_rate"),
        (["--by", "batch_size"], "All trials have the same batch_size"),
        (["--where", "workers=3"], "the study has the levels 1, 4"),
        (["--where", "workers"], "--where takes FACTOR=LEVEL"),
        (["--target", "7"], "--target 7 was not measured; choose one of 75, 50, 25, 10, 5, 2.5"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(folder, words, said):
    with pytest.raises(UsageError) as error:
        invoke("compare", folder, *words)
    assert said in str(error.value)


def test_a_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(UsageError):
        invoke("report", tmp_path)
