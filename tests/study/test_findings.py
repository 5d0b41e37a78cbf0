"""Findings of whole tables: what was planted is found and shown, what was not is not."""

import math

import numpy as np
import pandas as pd
import pytest

from paceline.errors import UsageError
from paceline.study.findings import compare_everything, compare_levels
from paceline.study.headline import headline, next_steps
from paceline.study.report import comparisons_table
from paceline.study.trials import METHOD, Trials

from .made_up import make_table


def row_of(comparison):
    return [cell.text for cell in comparisons_table([comparison]).rows[0]]


def overall(comparisons, base, other):
    return next(one for one in comparisons if (one.factor, one.base, one.other, one.where) == (METHOD, base, other, ()))


def test_a_planted_effect_is_found_and_said_with_its_uncertainty():
    trials = Trials(make_table({"locked": 1.0, "leashed": 1.4}, seeds=10, workers=(1, 8), batch_sizes=(64, 512)))
    found = [one for one in compare_everything(trials, trials.measure("time", "5")) if one.found]
    at_8 = next(one for one in found if one.where == (("workers", 8),) and one.factor == METHOD)
    assert at_8.ratio.low < 1.4 < at_8.ratio.high
    sooner, than, where, ratio, interval, pairs, *_ = row_of(at_8)
    assert (sooner, than, where, pairs) == ("leashed", "locked", "8 workers", str(at_8.ratio.pairs))
    assert ratio.startswith("1.")
    assert interval.startswith("1.")
    assert row_of(at_8.flipped) == row_of(at_8)  # the sooner one is named first
    workers = next(one for one in found if one.factor == "workers" and not one.where)
    assert row_of(workers)[:3] == ["8 workers", "1 worker", "everywhere"]


def test_methods_that_are_the_same_make_no_finding():
    """Forty studies of equal methods: at most 5 % of them have anything to say on methods, on average."""
    said = 0
    for study in range(40):
        table = make_table({"a": 1.0, "b": 1.0, "c": 1.0}, workers=(1, 2), batch_sizes=(512,), seeds=8)
        random = np.random.default_rng(study)
        for _, rows in table.groupby(
            ["factor.workers", "factor.seed"]
        ):  # who is who is drawn within each block of trials
            table.loc[rows.index, "factor.algorithm"] = random.permutation(rows["factor.algorithm"].to_numpy())
        trials = Trials(table)
        comparisons = compare_levels(trials, trials.measure("time", "5"), {})
        said += any(one.found for one in comparisons)
    assert said / 40 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 40)


def test_a_method_whose_runs_never_arrive_loses_though_it_has_no_times():
    table = make_table({"locked": 1.0, "hogwild": 3.0}, workers=(2,), batch_sizes=(512,), seeds=9)
    hogwild = table["factor.algorithm"] == "hogwild"
    table.loc[hogwild, ["outcome", "time_to_5_s"]] = ["diverged", np.nan]
    trials = Trials(table)
    (one,) = compare_levels(trials, trials.measure("time", "5"), {})
    assert one.found
    assert row_of(one)[:-1] == ["locked", "hogwild", "everywhere", "\N{INFINITY}x", "beyond any factor", "9", "0"]
    table.loc[hogwild, ["outcome", "wall_s"]] = ["stopped", 0.001]  # before the others had arrived either
    trials = Trials(table)
    (one,) = compare_levels(trials, trials.measure("time", "5"), {})
    assert not one.found
    assert row_of(one)[3] == "not known"
    assert (one.ratio.pairs, one.ratio.complete) == (9, 0)


def test_pairs_share_all_but_the_factor_and_follow_their_seeds():
    table = make_table(workers=(1, 2), batch_sizes=(64,), seeds=3).sample(frac=1, random_state=1)
    trials = Trials(table)
    first, second = trials.pairs(METHOD, "hogwild", "locked(kind=mutex)", {"workers": 2})
    left, right = trials.frame.iloc[first], trials.frame.iloc[second]
    assert len(first) == 3
    assert left["factor.seed"].tolist() == right["factor.seed"].tolist()
    assert set(left["factor.workers"]) == set(right["factor.workers"]) == {2}
    trials = Trials(table[table["number"] != left["number"].iloc[0]])
    assert len(trials.pairs(METHOD, "hogwild", "locked(kind=mutex)", {"workers": 2})[0]) == 2
    assert len(trials.pairs(METHOD, "hogwild", "no such", {})[0]) == 0


def test_fields_that_some_methods_lack_are_part_of_the_method():
    table = make_table({"hogwild": 1.0, "leashed": 1.2}, workers=(1, 2), batch_sizes=(512,), seeds=6)
    again = table[table["factor.algorithm"] == "leashed"].assign(**{"factor.algorithm.persistence": 1.0})
    again["number"] += len(table)
    table["factor.algorithm.persistence"] = np.where(table["factor.algorithm"] == "leashed", 0.0, np.nan)
    trials = Trials(pd.concat([table, again], ignore_index=True))
    assert trials.methods == ["hogwild", "leashed, persistence 0", "leashed, persistence 1"]
    assert trials.others == ["workers"]
    comparisons = compare_everything(trials, trials.primary)
    assert {(one.base, one.other) for one in comparisons if one.factor == "algorithm.persistence"} == {(0, 1)}
    assert overall(comparisons, "hogwild", "leashed, persistence 1").ratio.pairs == 12


def test_every_comparison_counts_once_and_small_ones_are_no_findings():
    trials = Trials(make_table(seeds=2), baseline="hogwild")
    comparisons = compare_everything(trials, trials.primary)
    keys = [(one.factor, frozenset([one.base, one.other]), one.where) for one in comparisons]
    assert len(set(keys)) == len(keys)
    cells = [one for one in comparisons if len(one.where) == 2]
    assert cells
    assert not any(one.found or one.testable for one in cells)
    assert row_of(cells[0])[4] == "too few pairs" or row_of(cells[0])[3] == "not known"
    assert {one.base for one in comparisons if one.factor == METHOD and not one.where} >= {"hogwild"}


def test_timing_only_studies_compare_throughput():
    trials = Trials(make_table({"locked": 1.0, "leashed": 1.4}, workers=(4,), seeds=6, timing_only=True))
    assert trials.primary.kind == "throughput"
    (one,) = [one for one in compare_everything(trials, trials.primary) if one.factor == METHOD and not one.where]
    assert one.found
    assert one.ratio.at_least == pytest.approx(1.4, rel=0.03)
    assert row_of(one)[:2] == ["leashed", "locked"]
    assert row_of(one)[3] == "1.39x"
    assert row_of(one)[4].startswith("1.3")


@pytest.mark.parametrize("by", ["workers", "batch_size"])
def test_another_factor_can_be_compared(by):
    trials = Trials(make_table(), by=by, baseline="2" if by == "workers" else 64)
    assert trials.baseline == ("2 workers" if by == "workers" else "batch size 64")
    assert "algorithm" in trials.others
    assert any(one.found for one in compare_levels(trials, trials.primary, {}))


def test_a_study_whose_trials_all_failed_says_so():
    table = make_table({"hogwild": 1.0, "leashed": 1.4}, seeds=2, timing_only=True)
    table["outcome"], table["samples_per_s"] = "crashed", math.nan
    trials = Trials(table)
    said = headline(trials, compare_everything(trials, trials.primary))
    assert said == "No winner: every trial diverged or crashed."


def test_an_unknown_baseline_is_answered_with_the_known_ones():
    with pytest.raises(UsageError, match=r"baseline 'mutex'; choose one of: locked\(kind=mutex\), "):
        Trials(make_table(seeds=1), baseline="mutex")


def test_a_single_trial_and_a_table_without_factors_are_studies_too():
    table = make_table({"hogwild": 1.0}, workers=(2,), batch_sizes=(64,), seeds=1)
    assert compare_everything(Trials(table), Trials(table).primary) == []
    bare = table[[name for name in table.columns if not name.startswith("factor.")]]
    assert Trials(bare).methods == ["all trials"]


def test_a_leader_that_lacks_a_level_is_not_said_to_be_best_there():
    frame = make_table({"locked": 1.0, "hogwild": 1.5}, workers=(1, 2), batch_sizes=(16,), seeds=8)
    frame.loc[frame["factor.algorithm"] == "hogwild", "factor.algorithm"] = "sequential"
    frame.loc[frame["factor.algorithm"] == "sequential", [name for name in frame if name.startswith("time_to_")]] /= 10
    trials = Trials(frame[(frame["factor.algorithm"] != "sequential") | (frame["factor.workers"] == 1)])
    comparisons = compare_everything(trials, trials.primary)
    assert headline(trials, comparisons).startswith("sequential won")
    assert "levels" not in [what for what, *_ in next_steps(trials, comparisons)]


def test_a_method_without_any_pair_is_named_and_keeps_the_leader_from_having_won():
    frame = make_table({"locked": 1.0, "hogwild": 1.5, "leashed": 1.2}, workers=(1, 2), batch_sizes=(16,), seeds=12)
    frame.loc[frame["factor.algorithm"] == "hogwild", [name for name in frame if name.startswith("time_to_")]] /= 10
    trials = Trials(frame[(frame["factor.algorithm"] == "leashed") == (frame["factor.workers"] == 1)])
    said = headline(trials, compare_everything(trials, trials.primary))
    assert said.startswith("hogwild led")
    assert said.endswith("; not compared, as no trials differ in the method alone: leashed.")


def test_more_pairs_are_not_asked_for_what_no_number_of_pairs_would_settle():
    frame = make_table({"locked": 1.0, "leashed": 1.2}, workers=(2,), batch_sizes=(16,), seeds=14, timing_only=True)
    frame["samples_per_s"] = [
        1000.0 + (one == "leashed") * (0.3 + 0.01 * (row % 3)) for row, one in enumerate(frame["factor.algorithm"])
    ]
    trials = Trials(frame)
    comparisons = compare_everything(trials, trials.primary)
    assert headline(trials, comparisons).startswith("No winner")
    assert next_steps(trials, comparisons)[-1] == ("pairs", "no more", "leashed and locked are as good as equal here")


def test_the_verdict_says_which_of_both_never_arrived():
    table = make_table({"locked": 1.0, "hogwild": 1.5}, workers=(2,), batch_sizes=(512,), seeds=9)
    table.loc[table["factor.algorithm"] == "hogwild", [name for name in table if name.startswith("time_to_")]] = np.nan
    table.loc[table["factor.algorithm"] == "hogwild", "outcome"] = "diverged"
    trials = Trials(table)
    said = headline(trials, compare_everything(trials, trials.primary))
    assert said.startswith("locked won")
    assert "where hogwild never arrived in most pairs (" in said


def test_few_pairs_of_several_settings_are_no_draws_from_one_distribution():
    def overall(**settings):
        trials = Trials(make_table({"locked": 1.0, "hogwild": 1.5}, batch_sizes=(16,), **settings))
        found = compare_everything(trials, trials.measure("time", "75"))
        (ratio,) = [one.ratio for one in found if one.factor == METHOD and not one.where]
        return ratio.pairs, ratio.complete, ratio.method

    assert overall(workers=(2,), seeds=4) == (4, 4, "t")
    assert overall(workers=(1, 2), seeds=2) == (4, 4, "none")


@pytest.mark.parametrize("timing_only", [True, False])
def test_a_best_level_that_was_the_last_is_gone_beyond(timing_only):
    frame = make_table(
        {"locked": 1.0, "leashed": 1.4}, workers=(2, 8), batch_sizes=(16,), seeds=8, timing_only=timing_only
    )
    trials = Trials(frame)
    steps = next_steps(trials, compare_everything(trials, trials.primary))
    (level,) = [how for what, how, _ in steps if what == "levels"]
    assert level == f"beyond {8 if timing_only else 2} workers"
