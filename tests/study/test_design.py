"""Which trials a study has, and in which order."""

import dataclasses

import pytest

from paceline.errors import UsageError
from paceline.study.design import plan_trials
from paceline.study.parts import Range
from paceline.study.study_file import Design, Limits


def settings(plan):
    return [dict(trial.setting) for trial in plan.trials]


def test_a_grid_is_every_combination_with_every_seed(timed):
    trials = plan_trials(timed(seeds=(3, 5))).trials
    found = {tuple(trial.factors.values()) for trial in trials}
    assert len(trials) == len(found) == 8
    assert found == {(a, w, s) for a in ("hogwild", "leashed") for w in (1, 2) for s in (3, 5)}


def test_seeds_are_blocks_in_which_every_combination_comes_once_in_another_order(timed):
    study = timed(factors={"algorithm": ("hogwild", "leashed", "locked"), "workers": (1, 2, 3)}, seeds=(0, 1, 2, 3))
    plan = plan_trials(study)
    blocks = [settings(plan)[at : at + 9] for at in range(0, 36, 9)]
    assert [{trial.factors["seed"] for trial in plan.trials[at : at + 9]} for at in range(0, 36, 9)] == [
        {0},
        {1},
        {2},
        {3},
    ]
    as_sets = [{tuple(one.values()) for one in block} for block in blocks]
    assert all(len(one) == 9 and one == as_sets[0] for one in as_sets)
    assert len({tuple(tuple(one.values()) for one in block) for block in blocks}) == 4  # four different orders
    assert plan_trials(study) == plan


def test_an_algorithm_without_the_field_is_tried_once(timed):
    factors = {"algorithm": ("hogwild", "leashed"), "algorithm.persistence": ("none", 0, 2)}
    plan = plan_trials(timed(factors=factors, seeds=(0,)))
    by_config = {trial.config.algorithm: trial.factors["algorithm.persistence"] for trial in plan.trials}
    assert by_config == {"hogwild": None, "leashed": "none", "leashed(persistence=0)": 0, "leashed(persistence=2)": 2}


def test_nested_fields(timed):
    factors = {
        "algorithm": ("locked", "leashed"),
        "algorithm.backoff": ("none", "linear", "exponential(cap=8)"),
        "algorithm.backoff.base": (1.0, 2.0),
    }
    found = {trial.config.algorithm for trial in plan_trials(timed(factors=factors, seeds=(0,))).trials}
    assert "leashed(backoff=exponential(base=2.0, cap=8.0))" in found
    assert len(found) == 2 * (1 + 2 * 2)  # without a back-off there is no base


def test_a_factor_without_effect_is_refused(timed):
    with pytest.raises(
        UsageError, match=r"'algorithm.persistance' has no effect.*Did you mean|'algorithm.persistance'"
    ):
        plan_trials(timed(factors={"algorithm": ("leashed",), "algorithm.persistance": (0, 1)}))


def test_one_at_a_time(timed):
    study = timed(
        factors={"algorithm": ("hogwild", "leashed"), "workers": (1, 2, 4), "batch_size": (8, 16)},
        baseline={"workers": 2},
        seeds=(0,),
        design=Design(kind="one-at-a-time"),
    )
    found = {tuple(one.values()) for one in settings(plan_trials(study))}
    assert found == {("hogwild", 2, 8), ("leashed", 2, 8), ("hogwild", 1, 8), ("hogwild", 4, 8), ("hogwild", 2, 16)}


def test_random_draws_are_so_many_different_ones_and_the_same_again(timed):
    study = timed(
        factors={"algorithm": ("hogwild", "leashed"), "learning_rate": Range(low=0.001, high=0.1, log=True)},
        design=Design(kind="random", trials=6),
    )
    plan = plan_trials(study)
    assert plan == plan_trials(study)
    rates = {one["learning_rate"] for one in settings(plan)}
    assert len(plan.trials) == 12
    assert len(rates) == 6
    assert all(0.001 <= rate <= 0.1 for rate in rates)
    few = timed(design=Design(kind="random", trials=50))  # there are only four
    assert len(plan_trials(few).trials) == 8


def test_a_method_for_fewer_workers_runs_with_what_it_can(timed):
    plan = plan_trials(timed(factors={"algorithm": ("sequential", "hogwild"), "workers": (1, 4)}, seeds=(0,)))
    assert [one["workers"] for one in settings(plan) if one["algorithm"] == "sequential"] == [1]
    assert plan.notes == ("sequential runs with 1 worker at most, so it is tried with 1.",)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"algorithm": ("hogwlid",)}, "Unknown algorithm 'hogwlid'. Did you mean 'hogwild'"),
        (
            {"algorithm": ("leashed",), "algorithm.persistence": ("many",)},
            "'persistence' must be a whole number or none",
        ),
        ({"workers": (0,)}, "workers = 0 is not possible"),
        ({"workers": (1.5,)}, "whole number"),
        ({"learning_rate": ("fast",)}, "learning_rate of TrainConfig must be a number"),
        ({"optimizer": ("adamm",)}, "Unknown optimizer"),
        ({"placement": ("bnid",)}, "Unknown placement"),
        ({"cluster.bus": (1,)}, "unknown name 'bus'. Did you mean 'bus_bytes_per_s'"),
        ({"cluster": ("big",)}, "unknown cluster 'big'"),
        ({"cluster.slow.9": (10,)}, "Worker 9 cannot be slow"),
    ],
)
def test_combinations_that_nobody_can_run_are_refused_before_anything_runs(timed, factors, message):
    with pytest.raises(UsageError, match=message) as raised:
        plan_trials(timed(factors=factors))
    assert "The combination" in str(raised.value)


def hash_of(base, **changes):
    return plan_trials(dataclasses.replace(base, **changes)).trials[0].hash


def test_the_hash_is_of_what_changes_the_result(timed, tmp_path):
    base = timed(factors={"algorithm": ("leashed",), "workers": (2,)}, seeds=(0,))
    name = plan_trials(base).trials[0].hash
    same = [
        {"name": "other", "question": "?", "data": tmp_path, "keep_events": False, "targets": (50.0,)},
        {"settings": {"batch_size": 8, "algorithm.backoff": "none"}},  # both are so by default
        {"factors": {"algorithm": ("leashed(persistence=none)",), "workers": (2, 3)}},
        {"cluster": {"workers": 2, "compute_s": 0.01}},
    ]
    for changes in same:
        assert name in {trial.hash for trial in plan_trials(dataclasses.replace(base, **changes)).trials}, changes
    others = [
        {"seeds": (1,)},
        {"settings": {"batch_size": 9}},
        {"settings": {"algorithm.persistence": 0}},
        {"limits": Limits(steps=5)},
        {"limits": Limits(steps=4, seconds=1)},
        {"cluster": {"compute_s": 0.02}},
        {"settings": {"cluster.slow.1": 10}},
        {"parameters": 1001},
        {"timing_only": False, "parameters": None},
    ]
    assert hash_of(base, limits=Limits(epochs=1)) == hash_of(base, limits=Limits(epochs=1.0))
    hashes = [hash_of(base, **changes) for changes in others]
    assert len({name, *hashes}) == 1 + len(others)
