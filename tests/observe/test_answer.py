import doctest

import pytest

from paceline.observe import compare, words
from paceline.observe.answer import answer
from paceline.observe.compare import clearly_best, group_runs, run_labels


def result(algorithm, time_s=None, *, outcome="converged", **more):
    return {
        "algorithm": algorithm, "task": "digits", "workers": 4, "outcome": outcome, "time_to_target_s": time_s, **more
    }  # fmt: skip


def test_the_doctests_hold():
    assert doctest.testmod(compare).failed == doctest.testmod(words).failed == 0


def test_a_clear_winner_is_named_with_its_ratio_and_a_caution():
    said = answer([result("hogwild", 20.0), result("leashed", 10.0), result("lockstep", 33.0), result("locked")])
    assert said[0] == (
        "leashed reached the target soonest, after 10.0 s. "
        "hogwild took 2.0 times as long (20.0 s) and lockstep took 3.3 times as long (33.0 s)."
    )
    assert said[1] == "locked did not get there."
    assert said[-1] == "One run each is no proof: repeat with other seeds before you choose."


def test_a_difference_of_a_few_percent_names_no_winner():
    said = answer([result("hogwild", 10.0, target_loss=0.4), result("leashed", 10.4, target_loss=0.4)])
    assert said[0] == (
        "hogwild and leashed reached the target loss of 0.4 at about the same time (10.0 s and 10.4 s): "
        "too close to name a winner."
    )


def test_a_diverged_run_wins_nothing_even_if_it_was_fast():
    said = answer([result("hogwild", 1.0, outcome="diverged", outcome_reason="NaN loss"), result("leashed", 10.0)])
    assert said[0] == "Only leashed reached the target, after 10.0 s."
    assert "hogwild diverged: NaN loss." in said


def test_without_a_target_the_deepest_fraction_counts_then_the_loss():
    fractions = [{"0.5": 1.0, "0.25": None}, {"0.5": 2.0, "0.25": 9.0}]
    said = answer([result(name, time_to_fraction_s=one) for name, one in zip("ab", fractions, strict=True)])
    assert said[0] == "Only b brought the training loss to 25 % of its start, after 9.00 s."
    said = answer([result("a", train_loss=0.5), result("b", train_loss=0.3)])
    assert said[0] == "b ended with the lowest training loss (b 0.300, a 0.500)."
    said = answer([result("a", train_loss=0.301), result("b", train_loss=0.3)])
    assert "too close to name a winner" in said[0]
    assert "cannot be compared" in answer([result("a"), result("b")])[0]


def test_repeats_are_compared_by_their_medians():
    runs = [result("a", time_s, seed=seed) for seed, time_s in enumerate((9.0, 10.0, 99.0))]
    runs += [result("b", time_s, seed=seed) for seed, time_s in enumerate((20.0, 21.0, None))]
    said = answer(runs)
    assert said[0] == "a reached the target soonest, after 10.0 s. b took 2.1 times as long (21.0 s)."
    assert said[-1] == "Medians of 3 runs each."
    assert answer(runs[:3])[0] == "a: all 3 runs reached the target, after 9.00 s to 99.0 s."
    assert "repeat with more seeds" in answer([*runs[:2], *runs[3:]])[-1]


def test_different_tasks_are_not_compared():
    assert "cannot be compared" in answer([result("a", 1.0), result("b", 2.0) | {"task": "words"}])[0]


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (result("a", 2.0, steps_to_target=1234), "a with 4 workers reached the target after 2.00 s and 1,234 updates."),
        (
            result("a", outcome="stopped", wall_s=9.0, target_loss=0.1, outcome_reason="3 epochs are over."),
            "a with 4 workers ended after 9.00 s without reaching the target loss of 0.1: 3 epochs are over.",
        ),
        (result("a", outcome="crashed", workers=1), "a with 1 worker crashed."),
        ({}, "The run ended."),
    ],
)
def test_one_run(one, said):
    assert answer([one])[0] == said


def test_labels_tell_runs_apart():
    same = [result("a", seed=0), result("a", seed=1), result("b", seed=0), result("a", seed=1)]
    assert run_labels(same) == ["a · seed 0", "a · seed 1", "b", "a · seed 1 (#2)"]
    assert [group.label for group in group_runs([result("a"), result("a") | {"workers": 8}])] == [
        "a · 4 workers", "a · 8 workers"
    ]  # fmt: skip
    assert answer([]) == ["There are no runs."]


def test_best_is_only_what_is_clearly_better():
    assert clearly_best([3.0, None, 1.0], lower=True) == 2
    assert clearly_best([3.0, 1.0], lower=False) == 0
    assert clearly_best([1.0, 1.04], lower=False) is None
    assert clearly_best([0.0, 0.0], lower=True) is None
    assert clearly_best([1.0, None], lower=True) is None
