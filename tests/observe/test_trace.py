import json

import numpy as np
import pytest

from paceline.observe.segments import KINDS, segments
from paceline.observe.trace import write_trace
from paceline.records.run_data import RunData

from .synthetic import METHODS, empty, make_run


def refuse(constant):
    raise AssertionError(constant)


def trace_of(run, tmp_path):
    return json.loads(write_trace(run, tmp_path / "trace.json").read_text(), parse_constant=refuse)


def slices_per_lane(trace):
    lanes = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append(event)
    return lanes


@pytest.mark.parametrize("method", METHODS)
def test_slices_of_a_lane_are_in_order_and_do_not_overlap(method, tmp_path):
    run = make_run(method, workers=3, slow=1, steps=120)
    lanes = slices_per_lane(trace_of(run, tmp_path))
    assert lanes.keys() == {1, 2, 3}
    for slices in lanes.values():
        starts = np.array([event["ts"] for event in slices])
        ends = starts + [event["dur"] for event in slices]
        assert (np.diff(starts) > 0).all()
        assert (ends[:-1] <= starts[1:] + 1e-6).all()
        assert {event["name"] for event in slices} <= set(KINDS)


def test_the_slices_hold_the_times_of_the_records(tmp_path):
    run = make_run("lockstep", workers=2, slow=1, steps=30)
    for worker, slices in slices_per_lane(trace_of(run, tmp_path)).items():
        records = run.records[worker - 1]
        total_us = {kind: sum(event["dur"] for event in slices if event["name"] == kind) for kind in KINDS}
        assert total_us["wait"] == pytest.approx(1e6 * records["wait_s"].sum(), abs=1)
        assert total_us["apply"] == pytest.approx(1e6 * records["apply_s"].sum(), abs=1)
        assert total_us["input"] == pytest.approx(1e6 * records["input_s"].sum(), abs=1)


def test_dropped_gradients_counters_and_names_are_there(tmp_path):
    run = make_run(slow=0)
    run.records[1]["loss"][3] = np.nan
    events = trace_of(run, tmp_path)["traceEvents"]
    dropped = [event for event in events if event["ph"] == "i"]
    assert len(dropped) == run.result["dropped_updates"] > 0
    assert all(event["name"] == "gradient dropped" and event["s"] == "t" for event in dropped)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "worker 0", 2: "worker 1", 3: "worker 2", 4: "worker 3"}
    staleness = [event for event in events if event["ph"] == "C" and event["name"].startswith("staleness")]
    assert len(staleness) == run.result["steps"]
    assert any(event["ph"] == "M" and event["name"] == "process_name" for event in events)


def test_a_long_run_is_cut_to_its_first_and_last_steps_and_says_so(tmp_path, monkeypatch):
    run = make_run(steps=200, workers=2)
    monkeypatch.setattr("paceline.observe.trace._MOST_STEPS_IN_ALL", 22)
    trace = trace_of(run, tmp_path)
    slices = slices_per_lane(trace)[1]
    ordered = run.records[0]["step"]
    assert sorted({event["args"]["step"] for event in slices}) == [*ordered[:6], *ordered[-5:]]
    assert trace["otherData"]["omitted"]["0"] == f"first 6 and last 5 of {len(ordered)} steps shown"
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert "first 6" in names[0]


def test_of_many_workers_the_first_are_shown_and_the_file_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.observe.trace._MOST_WORKERS", 3)
    trace = trace_of(make_run(steps=10, workers=5), tmp_path)
    lanes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert lanes == ["worker 0", "worker 1", "worker 2"]
    assert trace["otherData"]["omitted_workers"] == "the last 2 of 5"


def test_a_run_without_records_and_with_odd_names_is_valid(tmp_path):
    run = RunData(config={"algorithm": 'a"b\\', "task": "</script>"}, records={0: empty()})
    assert not slices_per_lane(trace_of(run, tmp_path))


def test_waiting_that_does_not_fit_after_the_gradient_is_drawn_before_it():
    rows = make_run("hogwild", workers=1, steps=1).records[0][:1].copy()
    rows["started_s"], rows["input_s"], rows["gradient_started_s"] = 0.0, 1.0, 4.0
    rows["gradient_ended_s"], rows["wait_s"], rows["apply_s"], rows["ended_s"] = 6.0, 2.5, 1.5, 8.0
    lane = segments(rows)
    drawn = [
        (KINDS[kind], start, end)
        for kind, start, end in zip(lane.kind, lane.start_s.tolist(), lane.end_s.tolist(), strict=True)
    ]
    assert drawn == [
        ("input", 0.0, 1.0), ("wait", 1.0, 3.0), ("gradient", 4.0, 6.0), ("wait", 6.0, 6.5), ("apply", 6.5, 8.0)
    ]  # fmt: skip


def test_overlapping_or_impossible_records_still_give_lanes_without_overlap():
    random = np.random.default_rng(0)
    rows = make_run("hogwild", workers=1, steps=300).records[0].copy()
    for name in ("started_s", "gradient_started_s", "gradient_ended_s", "ended_s", "wait_s", "apply_s", "input_s"):
        rows[name] += random.normal(0, 0.01, len(rows))
    lane = segments(rows)
    assert (lane.end_s > lane.start_s).all()
    assert (lane.end_s[:-1] <= lane.start_s[1:]).all()


def test_virtual_times_may_be_longer_than_64_bits_of_nanoseconds(tmp_path):
    run = make_run("hogwild", workers=1, steps=2)
    rows = run.records[0]
    for name in ("started_s", "gradient_started_s", "gradient_ended_s", "ended_s"):
        rows[name] += np.array([0.0, 1e11])
    (lane,) = slices_per_lane(trace_of(run, tmp_path)).values()
    assert lane[-1]["ts"] + lane[-1]["dur"] == pytest.approx(1e17)


def test_a_name_that_is_no_utf8_is_written_as_it_would_be_in_a_string(tmp_path):
    run = RunData(config={"out": "\udcff"})
    trace_of(run, tmp_path)
    run.save(tmp_path / "run")
    assert RunData.load(tmp_path / "run").config["out"] == "\udcff"
