"""`paceline advise backups`: from a cluster file's compute times, or from steps measured here."""

import json
import math

import pytest
from scipy.stats import expon, pareto, truncnorm
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.planner.backups import plan_backups
from paceline.planner.order_statistics import RecordedTimes

TRACE = [0.1, 0.11, 0.1, 0.12, 0.5, 0.1, 0.1, 0.13, 0.1, 0.2]
LAWS = {
    "0.1": RecordedTimes([0.1]),
    '"normal(average_s=0.1, deviation_s=0.02)"': truncnorm(-5.0, math.inf, 0.1, 0.02),
    '"exponential-tail(least_s=0.09, tail_s=0.02)"': expon(0.09, 0.02),
    '"pareto(least_s=0.06, shape=2.5)"': pareto(2.5, scale=0.06),
    str(TRACE): RecordedTimes(TRACE),
}


def backups(*arguments):
    result = CliRunner().invoke(app, ["advise", "backups", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def write(compute_s, rest="", workers=8):
        (tmp_path / "here.toml").write_text(f"workers = {workers}\ncompute_s = {compute_s}\n{rest}")
        return "here.toml"

    return write


@pytest.mark.parametrize("compute_s", LAWS)
def test_every_model_of_a_cluster_file_is_planned_from(here, compute_s):
    code, out, error = backups("--cluster", here(compute_s, "[slow]\n1 = 3\n"), "--json", "--rest-s", "0.01")
    assert code == 0, error
    found = json.loads(out, parse_constant=pytest.fail)
    plan = plan_backups(LAWS[compute_s], [1.0, 3.0] + [1.0] * 6, rest_s=0.01)
    assert [row["step_s"]["value"] for row in found["rows"]] == pytest.approx([row.step_s.value for row in plan.rows])
    assert [row["backups"] for row in found["rows"]] == [0, 1, 2]
    assert found["best"] == plan.best.backups
    assert found["best"] >= 1  # one is always slow
    assert found["algorithm"] == f"parameter-server(mode=sync(backups={found['best']}))"
    assert (found["best_in_subsets_share"] is None) == (compute_s != str(TRACE))


def test_the_table_names_the_best_the_rule_and_how_to_use_it(here):
    code, out, error = backups("--cluster", here("0.1", workers=4), "--slow", "0:10")
    assert code == 0, error
    assert "best 1" in out
    assert "The number of steps is proportional to 1 + 411 / k (as published for Inception" in out
    assert 'Best: --algorithm "parameter-server(mode=sync(backups=1))" --workers 4' in out
    code, out, _ = backups("--cluster", here(str(TRACE)), "--noise-scale", "500", "--batch-size", "32")
    assert max(map(len, out.split("The last three")[0].splitlines()[1:])) <= 80
    assert "proportional to 1 + 15.62 / k (from the noise scale)" in out
    assert "interval (s)" in out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


def test_spare_machines(here):
    found = json.loads(backups("--cluster", here(str(TRACE), workers=4), "--spare", "--max-backups", "2", "--json")[1])
    assert [(row["machines"], row["gradients_per_step"]) for row in found["rows"]] == [(4, 4), (5, 4), (6, 4)]
    assert "with 4 workers" in backups("--cluster", here("0.1", workers=4), "--spare")[1]  # equal ones need no spare


def test_measured_here(here, monkeypatch):
    monkeypatch.setattr("paceline.cli.backups._MEASURED_FOR_S", 0.05)
    code, out, error = backups("--task", "digits-mlp", "--workers", "4", "--noise-scale", "100", "--json")
    assert code == 0, error
    found = json.loads(out)
    assert "measured here" in found["times"]
    assert found["half_efficient_gradients"] == 100 / 8
    row = found["rows"][0]
    assert 0 < row["step_s"]["low"] < row["step_s"]["value"] < row["step_s"]["high"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "either --cluster FILE, or --task TASK"),
        ("--cluster here.toml --task digits-mlp", "either --cluster FILE, or --task TASK"),
        ("--cluster missing.toml", "missing.toml does not exist"),
        ("--cluster here.toml --workers 1", "Backups need several workers"),
        ("--cluster here.toml --workers 0", "--workers must be 1 or more"),
        ("--cluster here.toml --rest-s=-1", "--rest-s must be 0 or more"),
        ("--cluster here.toml --max-backups=-1", "--max-backups must be 0 or more"),
        ("--cluster here.toml --noise-scale 100", "give the samples per gradient with --batch-size"),
        ("--cluster here.toml --noise-scale=-1 --batch-size 8", "--noise-scale must be 0 samples or more"),
        ("--cluster here.toml --slow 9:2", "Worker 9 cannot be slow"),
        ("--task digits", "Did you mean 'digits-mlp'?"),
    ],
)
def test_refused(here, options, says):
    here("0.1")
    code, out, error = backups(*options.split())
    assert (code, out) == (2, "")
    assert says in error
    assert error.count("\n") == 1


def test_help_fits_a_screen_and_has_an_example(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    out = backups("--help")[1]
    assert "paceline advise backups --cluster here.toml" in out.partition("Example:")[2]
    assert len(out.splitlines()) <= 48
