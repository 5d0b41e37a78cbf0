"""The page on accuracy under layouts, small: it trains, and counts what the plan says."""

import importlib.util
from argparse import Namespace
from pathlib import Path

import pytest

from paceline.model_parallel.hybrid.layout import HybridParallel

FILE = Path(__file__).parents[2] / "benchmarks" / "hybrid_accuracy.py"
TASK = Path(__file__).parents[1] / "model_parallel" / "hybrid" / "wide_task.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("hybrid_accuracy", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_layouts_of_so_many_workers(script):
    assert script.layouts(4) == [None, "hybrid(groups=2)", "hybrid(groups=1)"]
    assert script.layouts(3) == [None, "hybrid(groups=1)"]
    assert script.layouts(1) == [None]
    assert HybridParallel(groups=2).min_weights == 65_536, "which the task's linear layer has"


def test_a_run_of_each_counts_the_plans_bytes_and_a_page_says_how_far_apart_they_are(script):
    options = Namespace(task=f"{TASK}:wide", workers=2, epochs=2.0, seeds=1)
    runs = {layout: [script.run(layout, 0, options)] for layout in script.layouts(2)}
    planned = {layout: script.planned_bytes(layout, options.task, 2, 8) for layout in runs}
    sent = runs["hybrid(groups=1)"][0]["sent_bytes"]
    assert sent == pytest.approx(planned["hybrid(groups=1)"], abs=20), "each operation's bytes are rounded"
    assert planned["hybrid(groups=1)"] < planned[None]
    assert runs[None][0]["accuracy"] == runs["hybrid(groups=1)"][0]["accuracy"], "there is no dropout"
    text = "\n".join(script.page(runs, planned, options))
    assert "| hybrid(groups=1) |" in text
    assert "All layouts are within a point" in text
    worse = {**runs, "hybrid(groups=1)": [{**runs[None][0], "accuracy": runs[None][0]["accuracy"] - 0.02}]}
    assert "Not within a point of pure data: hybrid(groups=1)." in script.verdict(worse)


def test_what_has_ended_is_not_trained_again(script, tmp_path, monkeypatch):
    options = Namespace(task="vgg-small", workers=2, epochs=1.0, seeds=1)
    made = []
    monkeypatch.setattr(script, "run", lambda layout, seed, _: made.append((layout, seed)) or {"accuracy": 0.5})
    for _ in range(2):
        done = script.Done(tmp_path / "done.jsonl")
        for layout in (None, "hybrid(groups=1)"):
            assert done.run(layout, 0, options) == {"accuracy": 0.5}
    assert made == [(None, 0), ("hybrid(groups=1)", 0)]
    script.Done(tmp_path / "done.jsonl").run(None, 0, Namespace(**{**vars(options), "epochs": 2.0}))
    assert made[2:] == [(None, 0)], "of another length"
