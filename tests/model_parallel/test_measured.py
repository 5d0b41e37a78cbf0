"""What a placed run writes of when its workers did what, and the lanes that are drawn of it."""

import json
from itertools import groupby

import pytest
from typer.testing import CliRunner

import paceline as pl
from model_parallel.models import placed, planned
from paceline.cli.app import app
from paceline.model_parallel.graph.measured import read_measured
from paceline.model_parallel.graph.problem import TensorInfo
from paceline.model_parallel.graph.recorder import Recorder


def order(events, kinds, place):
    """What a device did, each once where it was interrupted."""
    found = [(e.kind, e.name, e.to, e.microbatch) for e in events if e.kind in kinds and e.place == place]
    return [one for one, _ in groupby(found)]


@pytest.mark.parametrize(
    ("name", "options"), [("skips", {}), ("0-1-0", {"objective": "throughput", "microbatches": 3})]
)
def test_a_run_with_a_folder_is_drawn_beside_its_simulation(name, options, tmp_path):
    plan, folder = planned(name, 2, **options), tmp_path / "run"
    placed(name, plan, tmp_path, out=folder)
    read, measured = read_measured(folder)
    assert read == plan
    simulated = plan.schedule().events
    for worker in range(2):
        for kinds in (("forward",), ("backward",), ("move", "return")):
            assert order(measured, kinds, worker) == order(simulated, kinds, worker), kinds
    assert min(e.start_s for e in measured) == 0
    assert all(e.start_s <= e.end_s for e in measured)
    page, trace = tmp_path / "plan.html", tmp_path / "trace.json"
    result = CliRunner().invoke(app, ["place", str(folder), "--report", str(page), "--trace", str(trace)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.index("One step, simulated") < text.index("One step, measured")
    events = json.loads(trace.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["simulated", "measured"]
    assert sum(e["ph"] == "X" for e in events) == len(simulated) + len(measured)


def test_a_folder_without_times_and_options_beside_a_plan_are_refused(tmp_path):
    with pytest.raises(pl.UsageError, match="holds no times of a placed run: give launch out="):
        read_measured(tmp_path)
    (tmp_path / "placed-0.json").write_text('{"paceline_placed": 1}')
    with pytest.raises(pl.UsageError, match="no readable times"):
        read_measured(tmp_path)
    result = CliRunner().invoke(app, ["place", str(tmp_path), "--slow", "1:3"])
    assert result.exit_code == 2
    assert "already has a plan" in " ".join(result.stderr.split())


def test_only_ten_steps_that_train_are_recorded(tmp_path):
    ticks = iter(range(10_000))
    recorder, tensor = Recorder(0, clock=lambda: float(next(ticks))), TensorInfo("a", 0, (1,), 8)
    for step in range(15):
        for trains in (True, False):
            recorder.begin_step(trains=trains)
            recorder.ran("g", recorder.clock(), [])
            recorder.message("out", "move", step, tensor, (0, 1), recorder.clock())
            if trains:
                recorder.end_backward()
    recorder.begin_step(trains=True)
    plan = planned("two towers", 1)
    recorder.write(tmp_path, plan)
    steps = json.loads((tmp_path / "placed-0.json").read_text())["steps"]
    assert list(map(int, steps)) == list(range(2, 12))
    assert all(len(one["groups"]) == len(one["messages"]) == 1 for one in steps.values())
