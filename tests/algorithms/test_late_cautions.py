"""What late averages cost is said where "auto" has chosen it, and is what a lone worker's result says it is."""

import re
import warnings

import pytest

import paceline as pl
from algorithms.delayed_reference import run_loop
from algorithms.test_delayed import progress
from paceline.algorithms.chosen_delay import ChosenDelay
from paceline.errors import AlgorithmWarning

pytestmark = pytest.mark.filterwarnings("ignore:Merges drop:paceline.errors.AlgorithmWarning")


def test_a_chosen_delay_that_costs_most_of_the_progress_is_warned_of_and_noted():
    """8 of 8 steps late, as the average takes longer; on a fast network 1 of 8, and nobody is warned: the control."""
    settings = {"timing_only": True, "num_parameters": 2_000_000}
    for spec, says in (
        (
            "da-sgd(period=8, delay=auto)",
            r"^delay=auto has chosen 8 steps\. Merges drop .* leaves 0\.25 .* by 4 to make up",
        ),
        (
            "diloco(period=8, delay=auto)",
            r"^delay=auto has chosen 7 steps\. Merges drop .* leaves 0\.12 of the progress",
        ),
    ):
        config = pl.TrainConfig(task="digits-mlp", algorithm=spec, steps=100)
        assert pl.parse(spec).caution(4) == ""
        for bandwidth, is_warned in ((1e6, True), (1e12, False)):
            cluster = pl.Cluster(workers=4, compute_s=0.2, bandwidth_bytes_per_s=bandwidth, latency_s=1e-5)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = pl.simulate_task(config, cluster=cluster, **settings).result
            said = [str(one.message) for one in caught if one.category is AlgorithmWarning]
            assert result.get("notes", []) == said
            assert (len(said), result["delay"] > 1) == (is_warned, is_warned)
            assert all(re.search(says, one) for one in said), said


def test_real_workers_note_a_chosen_delay_that_costs_most_of_the_progress(monkeypatch):
    monkeypatch.setattr(ChosenDelay, "take", lambda self, start: 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run, _ = run_loop("da-sgd(delay=auto)", 3, 60, "threads")
    assert (run.result["delay"], run.result["progress_factor"]) == (3, 0.4375)
    [note] = run.result["notes"]
    assert note.startswith("delay=auto has chosen 3 steps. Merges drop")
    assert [str(one.message) for one in caught if one.category is AlgorithmWarning] == [note]


# A lone worker's result


@pytest.mark.parametrize("backend", ["simulator", "threads"])
@pytest.mark.parametrize("spec", ["da-sgd(delay=3)", "da-sgd(delay=auto)", "diloco(period=4, delay=auto)"])
def test_a_lone_worker_has_no_delay_loses_nothing_and_is_warned_of_nothing(spec, backend):
    with warnings.catch_warnings():
        warnings.simplefilter("error", AlgorithmWarning)
        result = run_loop(spec, 1, 30, backend)[0].result
    assert (result["delay"], result["progress_factor"], result.get("rate_factor", 1.0)) == (0, 1.0, 1.0)
    assert not result.get("notes")


@pytest.mark.parametrize("delay", [0, 2, 6])
def test_a_lone_worker_of_diloco_loses_what_its_result_says(delay):
    """It steps with its own late changes: 1 - delay / 8 of a plain loop's progress, whose steps have length 1."""
    spec = f"diloco(period=8, delay={delay}, outer=sgd(rate=1))"
    (early, _), (late, result) = (progress(spec, delay + rounds * 8, workers=1) for rounds in (3, 13))
    assert (late - early) / 80 == pytest.approx(1 - delay / 8, abs=1e-12)
    assert result["progress_factor"] == pytest.approx(1 - delay / 8)
    assert result["delay"] == delay
