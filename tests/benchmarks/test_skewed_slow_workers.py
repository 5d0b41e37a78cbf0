"""The page on workers with their own data: what it runs, and what it says of made-up accuracies."""

import importlib
import math
from pathlib import Path

import pytest

FIDELITY = Path(__file__).parents[2] / "benchmarks" / "fidelity"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FIDELITY))
        patch.syspath_prepend(str(FIDELITY.parent))
        yield importlib.import_module("skewed_slow_workers")


def made(script, level):
    """All runs; `level` is a method's accuracy at its best rate, which is 1."""
    records = []
    for part, spec, rate, seed in script.plan(records):
        accuracy = level[spec] - 0.01 * abs(math.log2(rate)) + 0.001 * (seed % 5)
        records.append(
            {"part": part, "algorithm": spec, "rate": rate, "seed": seed, "accuracy": accuracy, "protocol": 1}
        )
        assert len(records) < 1000
    return records


def test_all_methods_run_at_their_best_rate_with_seeds_of_their_own(script):
    level = dict.fromkeys(script.METHODS, 0.4) | {script.ASYNC: 0.3, script.SILENT: 0.1}
    level |= {script.RULES[0]: 0.42, script.RULES[1]: 0.38}
    records = made(script, level)
    full = [one for one in records if one["part"] == "full"]
    assert {one["rate"] for one in full} == {1.0}
    assert {one["seed"] for one in full} == set(range(100, 105))
    assert len(full) == 5 * len(script.METHODS)
    assert not list(script.plan(records)), "nothing is made twice"
    page = script.markdown(records)
    first = page.split("\n\n")[1]
    assert "`ringleader` and `rescaled` are more than a point ahead of plain `async` in every seed" in first
    assert "more than a point behind lockstep in every seed: holds, 5 of 5" in first
    assert "within a point of lockstep in every seed, or ahead: FAILS, 5 of 10" in first
    assert "`parameter-server(mode=ringleader)` is ahead of lockstep" in first
    assert "`parameter-server(mode=async(rate=rescaled))` is behind lockstep" in first
    assert "no communication, models averaged at the end (control) 10.2 (10.0 to 10.4)" in first
    assert "edge" not in first
    assert "does not pay" not in first


def test_what_the_controls_destroy_is_told(script):
    level = dict.fromkeys(script.METHODS, 0.4) | {script.ALONE: 0.45}
    first = script.markdown(made(script, level)).split("\n\n")[1]
    assert "more than a point behind lockstep in every seed: FAILS, 0 of 5" in first
    assert "`ringleader` and `rescaled` ARE NOT more than a point ahead of plain `async`" in first
    assert "is not told apart from lockstep" in first
    assert "One fast worker with the data of all is ahead of every method in every seed" in first
