"""The loop that advice is asked about runs on real workers and on simulated ones."""

import importlib.util
from pathlib import Path

import pytest

import paceline as pl
from real_data import needs_mnist

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "contest_loop.py"


@needs_mnist
@pytest.mark.parametrize("run", [pl.launch, pl.simulate])
def test_the_loop_of_the_head_to_head_runs(run, monkeypatch):
    spec = importlib.util.spec_from_file_location("contest_loop", SCRIPT)
    contest_loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(contest_loop)
    monkeypatch.setattr(contest_loop, "EPOCHS", 1)
    backend = {"backend": "threads"} if run is pl.launch else {}
    assert run(contest_loop.train, workers=2, algorithm="hogwild", limit_samples=640, **backend).result["steps"] >= 10
