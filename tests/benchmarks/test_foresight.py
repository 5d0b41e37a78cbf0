"""The arithmetic by which predictions are compared with measurements."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

FIDELITY = Path(__file__).parents[2] / "benchmarks" / "fidelity"
with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(FIDELITY))
    foresight_report = importlib.import_module("foresight_report")


def test_errors_are_of_what_was_measured():
    assert foresight_report.relative_error(11.0, 10.0) == pytest.approx(0.1)
    assert foresight_report.relative_error(5.0, 10.0) == -0.5


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ([1, 1], [10, 10], 0.0),  # counts of runs of different length
        ([1], [0, 0, 7], 1.0),
        ([1, 1], [1, 1, 2], 0.5),
        ([3, 1], [1, 3], 0.5),
        ([0.2, 0.3, 0.5], [0.5, 0.3, 0.2], 0.3),
    ],
)
def test_total_variation(a, b, distance):
    assert foresight_report.total_variation(a, b) == pytest.approx(distance)
    assert foresight_report.total_variation(b, a) == pytest.approx(distance)


def test_the_advised_choice_is_judged_by_what_was_measured():
    measured = {"a": 100.0, "b": 200.0, "c": 190.0}
    assert foresight_report.shortfall({"a": 1.0, "b": 2.0, "c": 3.0}, measured) == ("c", "b", pytest.approx(0.05))
    assert foresight_report.shortfall({"a": 9.0, "b": 2.0, "c": 3.0}, measured)[2] == pytest.approx(0.5)
    assert foresight_report.shortfall(measured, measured) == ("b", "b", 0.0)


def setting(workers, batch_size, epochs=1.0):
    return SimpleNamespace(workers=workers, batch_size=batch_size, epochs=epochs, key=f"{workers}/{batch_size}")


def test_ernest_finds_a_planted_law_from_other_numbers_of_workers():
    def round_s(workers, batch_size):
        return 0.002 + 0.001 * batch_size / 64 + 0.0005 * workers

    short = [setting(1, 16), setting(1, 64), setting(2, 32), setting(4, 64), setting(4, 16)]
    measured = {
        one.key: [{"wall_s": 10 * round_s(one.workers, one.batch_size), "steps": 10 * one.workers}] for one in short
    }
    asked = setting(3, 64, epochs=2.0)
    rounds = 2.0 * 60_000 / 64 / 3
    assert foresight_report.ernest_s(asked, short, measured) == pytest.approx(rounds * round_s(3, 64), rel=1e-6)


def test_a_simulation_is_corrected_by_what_steps_of_short_runs_took_longer():
    short = [setting(1, 64), setting(2, 16), setting(4, 32)]
    foreseen = {"wall_s": 3.0, "steps": 300, "short_runs_s": {"2/16": 1.0, "4/32": 2.0}}
    measured = {  # 1 and 3 ms longer per step; one worker alone says nothing
        "1/64": [{"wall_s": 99.0, "steps": 1}],
        "2/16": [{"wall_s": 1.1, "steps": 200}],
        "4/32": [{"wall_s": 2.3, "steps": 400}],
    }
    assert foresight_report.corrected_s(setting(3, 64), foreseen, short, measured) == pytest.approx(3.0 + 0.002 * 100)


def plan_of(*settings):
    return SimpleNamespace(
        settings=settings,
        grids={},
        bars={"median_error": 0.1, "worst_error": 0.2, "staleness_distance": 0.1, "advice_shortfall": 0.05},
    )


def test_the_page_says_first_which_of_its_bars_are_missed():
    one = setting(3, 256)
    one.algorithm = "lockstep"
    parts = {
        "predicted": {one.key: {"wall_s": 7.29, "staleness": [1]}},
        "measured": {one.key: [{"wall_s": 10.0, "staleness": [1]}]},
    }
    said = foresight_report.headline(plan_of(one), parts)
    assert said.startswith("Wall time at worst is 27.1% off (`lockstep` with 3 workers), where 20% is asked: MISSED.")
    assert "hindsight" not in said
    parts["predicted_before"] = {one.key: {"wall_s": 10.0}}
    assert "these are predictions in hindsight" in foresight_report.headline(plan_of(one), parts)
    parts["predicted"][one.key]["wall_s"] = 10.5
    assert "is 5.0% off (`lockstep` with 3 workers), where 20% is asked: met." in foresight_report.headline(
        plan_of(one), parts
    )
