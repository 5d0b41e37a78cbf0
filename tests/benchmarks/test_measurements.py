"""Measurements in pairs: what is missing is measured, in turn, and a row is what its file says."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def measurements(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("measurements")


def test_an_interrupted_measurement_goes_on(measurements, tmp_path):
    """Every second time the peer goes first."""
    path, calls = tmp_path / "runs.jsonl", []

    def timed(name, value):
        return lambda: calls.append(name) or value

    def measure(repeats):
        values = measurements.in_turn(ours=timed("ours", 3.00001), peer=timed("peer", 2.0))
        measurements.Measurements(path, repeats).measure("a row", values, section="all", unit="s", target="2")

    measure(2)
    assert calls == ["ours", "peer", "peer", "ours"]
    measure(3)
    assert calls[4:] == ["ours", "peer"]
    (row,) = measurements.rows(measurements.protocol.read(path))
    assert (row.values("ours"), row.values("peer"), row.ratio, row.target) == ([3.0] * 3, [2.0] * 3, 1.5, "2")


def test_runs_of_another_protocol_are_refused(measurements, tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"protocol": 0}\n')
    with pytest.raises(SystemExit, match="runs of another protocol"):
        measurements.Measurements(path, 1)
