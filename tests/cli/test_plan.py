"""`paceline plan backups`: the number of backup workers from a run's times."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import paceline as pl
from paceline.cli.app import app
from paceline.planner.backups import plan_arrivals
from paceline.records.run_data import RunData
from paceline.simulator.cluster import Cluster
from paceline.simulator.compute import ExponentialTail, Recorded

WORKERS = 100


def plan(*arguments):
    result = CliRunner().invoke(app, ["plan", "backups", *map(str, arguments)])
    return result.exit_code, result.stdout, " ".join(map(str, [result.exception, result.stderr]))


def published_times(steps, seed):
    """Seconds (steps, workers): as of Inception on 100 machines, most within 2 s, one in a hundred held up for long."""
    draws = np.random.default_rng(seed)
    times_s = draws.gamma(100, 0.0152, (steps, WORKERS))
    held_up = draws.random((steps, WORKERS)) < 0.01
    times_s[held_up] *= 1 + draws.pareto(1.1, int(held_up.sum()))
    return np.minimum(times_s, 310.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run of 100 machines of each kind; the times are those of the records, so any algorithm will do."""
    made = {}
    trace = tuple(published_times(150, seed=1).flatten().tolist())
    cluster = Cluster(workers=WORKERS, compute_s=Recorded(times_s=trace))
    for name, spec in (
        ("all", "parameter-server"),
        ("four", "parameter-server(mode=sync(backups=4))"),
        ("async", "locked"),
    ):
        config = pl.TrainConfig(algorithm=spec, steps=70)
        run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=100)
        made[name] = run.save(tmp_path_factory.mktemp(name))
    return made


@pytest.mark.parametrize("name", ["all", "four", "async"])
def test_the_published_shape_wants_three_to_eight_backups_within_2_percent_of_the_optimum(folders, name):
    truth = plan_arrivals(published_times(20_000, seed=0))
    totals = {row.backups: row.time_relative.value for row in truth.rows}
    code, out, error = plan(folders[name], "--json")
    assert code == 0, error
    found = json.loads(out)
    assert 3 <= found["best"] <= 8
    assert totals[found["best"]] <= 1.02 * truth.best.time_relative.value
    assert found["as_they_came"] == (name == "all")
    assert found["workers"] == WORKERS
    rows = {row["backups"]: row for row in found["rows"]}
    assert list(rows) == list(range(26))
    for b in (4, 10, 25):
        assert rows[b]["step_s"]["value"] == pytest.approx(
            next(row.step_s.value for row in truth.rows if row.backups == b), rel=0.03
        )
        assert rows[b]["total_s"] == pytest.approx(rows[b]["step_s"]["value"] * rows[b]["steps"])
    assert min(rows.values(), key=lambda row: row["total_s"])["backups"] == found["best"] in found["within_2_percent"]


@pytest.mark.parametrize("measured_with", [0, 4])
def test_a_run_with_so_many_backups_has_the_steps_that_were_planned(measured_with, tmp_path):
    """As long as nobody is late for more than a step, nearly: planned from a run with and from one without backups."""
    cluster = Cluster(workers=20, compute_s=ExponentialTail(least_s=1.0, tail_s=0.1))
    runs = {}
    for b in (0, 4):
        config = pl.TrainConfig(algorithm=f"parameter-server(mode=sync(backups={b}))", steps=100)
        runs[b] = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=100)
    found = json.loads(plan(runs[measured_with].save(tmp_path / "run"), "--json")[1])
    for b, run in runs.items():
        rows = np.concatenate(list(run.records.values()))
        ends = [rows["ended_s"][rows["applied_version"] == version].min() for version in range(1, 91)]
        assert found["rows"][b]["step_s"]["value"] == pytest.approx(np.diff(ends).mean(), rel=0.08)
    assert found["rows"][measured_with]["steps"] == pytest.approx(runs[measured_with].result["steps"], rel=0.05)


def test_the_table_names_the_best_and_how_to_use_it(folders):
    code, out, _ = plan(folders["all"], "--max-backups", "9")
    assert code == 0
    assert "best 6" in out
    assert '--algorithm "parameter-server(mode=sync(backups=' in out
    assert "Within 2 % of the best: b = 3 to 9." in out
    steps_fall_for_ever = json.loads(plan(folders["all"], "--json", "--half-efficient", "inf")[1])
    assert (
        steps_fall_for_ever["rows"][10]["time_relative"]["value"]
        > json.loads(plan(folders["all"], "--json")[1])["rows"][10]["time_relative"]["value"]
    )


def test_a_real_run(tmp_path):
    run = pl.train(
        pl.TrainConfig(algorithm="parameter-server", workers=3, steps=30, backend="threads"), out=tmp_path / "run"
    )
    code, out, error = plan(tmp_path / "run", "--json")
    assert code == 0, error
    found = json.loads(out)
    assert [row["backups"] for row in found["rows"]] == [0, 1]
    assert (found["workers"], found["as_they_came"]) == (3, True)
    # Without backups it is the run itself: its steps, in its time but for the start.
    assert found["rows"][0]["steps"] == 30
    assert 0 < found["rows"][0]["total_s"] < 1.1 * run.result["wall_s"]


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    RunData(config={}).save(folder / "empty")
    config = pl.TrainConfig(algorithm="sequential", workers=1, steps=5)
    pl.simulate_task(config, timing_only=True, num_parameters=1).save(folder / "alone")
    return folder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("missing", "missing is not the folder of a run"),
        ("empty", "empty has no events: plan from a run that has trained."),
        ("alone", "alone had 1 worker"),
        ("alone --half-efficient=-1", "--half-efficient must be 0 or more, not -1"),
        ("alone --half-efficient=nan", "--half-efficient must be 0 or more"),
        ("alone --max-backups=-1", "--max-backups must be 0 or more, not -1"),
    ],
)
def test_refused(options, says, two_folders, monkeypatch):
    monkeypatch.chdir(two_folders)
    result = CliRunner().invoke(app, ["plan", "backups", *options.split()])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
