import doctest

import pytest

from paceline.observe import compare, words
from paceline.observe.compare import caution, clearly_best, headline, method_labels, run_labels


def result(algorithm, time_s=None, *, outcome="converged", **more):
    return {
        "algorithm": algorithm, "task": "digits", "workers": 4, "outcome": outcome, "time_to_target_s": time_s, **more
    }  # fmt: skip


def test_the_doctests_hold():
    assert doctest.testmod(compare).failed == doctest.testmod(words).failed == 0


def test_a_clear_winner_is_named_with_the_next_and_its_ratio():
    runs = [result("hogwild", 20.0), result("leashed", 10.0), result("lockstep", 33.0), result("locked")]
    said = headline(runs)
    assert said == "leashed reached the target soonest: 10.0 s; the next, hogwild: 20.0 s, 2.0 times as much."
    assert caution(runs) == "Few runs are no proof: repeat with other seeds before you choose."


def test_a_difference_of_a_few_percent_names_no_winner():
    said = headline([result("hogwild", 10.0, target_loss=0.4), result("leashed", 10.4, target_loss=0.4)])
    assert said == (
        "hogwild and leashed reached the target loss of 0.4 soonest, within 5 % of each other (10.0 s): "
        "too close to name a winner."
    )


def test_of_many_that_are_close_few_are_named():
    said = headline([result(f"hogwild(x={number})", 10.0) for number in range(100)])
    assert "hogwild(x=10) and 97 more reached the target soonest" in said


def test_a_diverged_run_wins_nothing_even_if_it_was_fast():
    said = headline([result("hogwild", 1.0, outcome="diverged", outcome_reason="NaN loss"), result("leashed", 10.0)])
    assert said == "Only leashed reached the target: 10.0 s."


def test_without_a_target_the_deepest_fraction_counts_then_the_loss():
    fractions = [{"0.5": 1.0, "0.25": None}, {"0.5": 2.0, "0.25": 9.0}]
    said = headline([result(name, time_to_fraction_s=one) for name, one in zip("ab", fractions, strict=True)])
    assert said == "Only b brought the training loss to 25 % of its start: 9.00 s."
    said = headline([result("a", train_loss=0.5), result("b", train_loss=0.3)])
    assert said == "b ended with the lowest training loss: 0.300; the next, a: 0.500, 1.67 times as much."
    assert "too close to name a winner" in headline([result("a", train_loss=0.301), result("b", train_loss=0.3)])
    assert "cannot be compared" in headline([result("a"), result("b")])


def test_repeats_are_compared_by_their_medians():
    runs = [result("a", time_s, seed=seed) for seed, time_s in enumerate((9.0, 10.0, 99.0))]
    runs += [result("b", time_s, seed=seed) for seed, time_s in enumerate((20.0, 21.0, None))]
    assert headline(runs) == "a reached the target soonest: 10.0 s; the next, b: 21.0 s, 2.1 times as much."
    assert caution(runs) == ""
    assert headline(runs[:3]) == "a reached the target: 10.0 s (median)."
    assert caution([*runs[:2], *runs[3:]])


def test_different_tasks_are_not_compared():
    assert "cannot be compared" in headline([result("a", 1.0), result("b", 2.0) | {"task": "words"}])


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (result("a", 2.0, steps_to_target=1234), "a with 4 workers reached the target after 2.00 s."),
        (
            result("a", outcome="stopped", wall_s=9.0, target_loss=0.1, outcome_reason="3 epochs are over."),
            "a with 4 workers ended after 9.00 s without reaching the target loss of 0.1: 3 epochs are over.",
        ),
        (
            result("a", 2.0, outcome="crashed", wall_s=9.0, target_loss=0.1, outcome_reason="no room"),
            "a with 4 workers crashed after 9.00 s: no room.",
        ),
        (result("a", outcome="crashed", workers=1), "a with 1 worker crashed."),
        ({}, "The run ended."),
    ],
)
def test_one_run(one, said):
    assert headline([one]) == said


def test_labels_tell_runs_apart():
    same = [result("a", seed=0), result("a", seed=1), result("b", seed=0), result("a", seed=1)]
    assert run_labels(same) == ["a · seed 0", "a · seed 1", "b", "a · seed 1 (#2)"]
    assert method_labels([result("a"), result("a") | {"workers": 8}]) == ["a · 4 workers", "a · 8 workers"]
    assert (headline([]), caution([])) == ("There are no runs.", "")


def test_best_is_only_what_is_clearly_better():
    assert clearly_best([3.0, None, 1.0], lower=True) == 2
    assert clearly_best([3.0, 1.0], lower=False) == 0
    assert clearly_best([1.0, 1.04], lower=False) is None
    assert clearly_best([0.0, 0.0], lower=True) is None
    assert clearly_best([1.0, None], lower=True) is None
