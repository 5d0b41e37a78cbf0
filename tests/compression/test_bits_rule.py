"""DQ-SGD's rule, step by step."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from chosen import each_value
from compression.worlds import gaussian
from paceline.compression.bits_rule import Budget, History, error_of, half_log2, power
from paceline.compression.dq import DQ


def best_whole(log2, spent):
    """Least sum of errors with so many whole bits: each bit where it takes away most, as errors are convex."""
    bits = np.full(len(log2), 2)
    for _ in range(spent - int(bits.sum())):
        gains = [
            4.0**one * (error_of(b) - error_of(b + 1)) if b < 8 else -1.0 for one, b in zip(log2, bits, strict=True)
        ]
        bits[int(np.argmax(gains))] += 1
    return sum(4.0**one * error_of(int(b)) for one, b in zip(log2, bits, strict=True))


@pytest.mark.parametrize("size", [1e-70, 0.3, 1.0, 5e60])
def test_logarithms_and_powers_are_those_of_the_processor(size):
    assert half_log2(size) == pytest.approx(0.5 * math.log2(size), rel=1e-12, abs=1e-15)
    assert power(0.97, 50) == pytest.approx(0.97**50, rel=1e-12)


# Step by step

T = 400
CHANGE = np.arange(T) / T
DRAWS = np.random.default_rng(0)
NORMS = {  # log2 of the gradient's norm
    "constant": np.zeros(T), "noisy": DRAWS.normal(0, 0.3, T), "very noisy": DRAWS.normal(0, 0.7, T),
    "falls 16 times": -4 * CHANGE, "falls by half": -CHANGE, "falls and settles": -2 * np.minimum(1, 5 * CHANGE),
    "falls like 1 / sqrt(t)": -0.5 * np.log2(1 + np.arange(T)), "falls, noisy": -4 * CHANGE + DRAWS.normal(0, 0.3, T),
    "falls by half twice": -np.floor(3 * CHANGE), "rises 16 times": 4 * CHANGE, "rises twice": CHANGE,
    "rises, noisy": 4 * CHANGE + DRAWS.normal(0, 0.3, T), "warm-up": np.minimum(0, 4 * CHANGE - 2),
    "short warm-up": np.minimum(0, 30 * CHANGE - 3),
    "warm-up, noisy": np.minimum(0, 30 * CHANGE - 3) + DRAWS.normal(0, 0.2, T),
    "warm-up and fall": np.minimum(np.minimum(0, 30 * CHANGE - 3), 0.2 - 2 * CHANGE),
    "swings": 2 * np.sin(np.arange(T) / 8), "swings slowly": 2 * np.sin(10 * math.pi * CHANGE),
    "swings once": 2 * np.cos(4 * math.pi * CHANGE), "swings a little": 0.5 * np.sin(np.arange(T) / 30),
    "a step up": 3.0 * (CHANGE >= 0.5), "a late step up": 3.0 * (CHANGE >= 0.9), "a step down": -3.0 * (CHANGE >= 0.5),
    "falls and comes back": np.where(CHANGE < 0.5, -8 * CHANGE, 0.0),
    "cosine": 0.5 * np.log2(0.01 + 0.5 * (1 + np.cos(math.pi * CHANGE))),
    **{f"random walk {seed}": np.cumsum(np.random.default_rng(seed).normal(0, 2 / math.sqrt(T), T)) for seed in range(4)},
}  # fmt: skip


def taken(log2, budget, *, known=False):
    """The bits of every step."""
    bits = []
    for size in 4.0**log2:
        bits.append(budget.choose(float(size)) if known else budget.choose())
        budget.account(float(size), bits[-1])
    return bits


def over_fixed(log2, bits, alpha=1.0):
    """The sum of errors over that of fixed bits at the same mean, of real numbers of levels."""
    weights = 4.0**log2 * alpha ** (len(log2) - 1 - np.arange(len(log2)))
    made = sum(weight * error_of(one) for weight, one in zip(weights, bits, strict=True))
    return made / (weights.sum() / (4 * (2.0 ** (np.mean(bits) - 1) - 1) ** 2))


@pytest.mark.parametrize(("target", "total"), [(3, None), (4, T), (6, None)])
@pytest.mark.parametrize("norms", NORMS)
def test_never_much_worse_than_fixed_bits_and_within_the_budget(norms, total, target):
    for known in (False, True):
        bits = taken(NORMS[norms], Budget(target, total_steps=total), known=known)
        assert set(map(type, bits)) == {int}
        assert over_fixed(NORMS[norms], bits) <= 1.05
        for steps in (200, 300, T):
            assert np.mean(bits[:steps]) == pytest.approx(target, rel=0.02)


def test_rounded_bits_that_alternate_keep_to_a_budget_between_two():
    for target in (2.5, 4.3, 7.9):
        bits = taken(np.zeros(200), Budget(target))
        assert sum(bits) == pytest.approx(200 * target, abs=1)
        assert set(bits) == {math.floor(target), math.ceil(target)}


@pytest.mark.parametrize("target", [2, 4, 7.7])
@pytest.mark.parametrize("norms", ["constant", "falls 16 times", "swings"])
def test_a_run_may_be_longer_than_total_steps(norms, target):
    bits = taken(NORMS[norms], Budget(target, alpha=0.9, total_steps=T // 4))
    assert set(bits) <= set(range(2, 9))
    assert np.mean(bits[T // 4 :]) == pytest.approx(target, rel=0.03)


@pytest.mark.parametrize("total", [None, T])
@pytest.mark.parametrize("norms", ["swings", "swings slowly"])
def test_sizes_that_swing_make_less_error_once_they_have_come_back(norms, total):
    """The best that could be done with all sizes known is 0.35."""
    for known in (False, True):
        bits = taken(NORMS[norms], Budget(4, total_steps=total), known=known)
        assert over_fixed(NORMS[norms], bits) < 0.85
    late = slice(T // 2, T)
    assert np.corrcoef(bits[late], NORMS[norms][late])[0, 1] > 0.6


@pytest.mark.parametrize("total", [None, 500])
def test_what_is_saved_or_spent_is_paid_back(total):
    log2 = np.concatenate([2 * np.sin(np.arange(200) / 8), np.zeros(300)])
    bits = taken(log2, Budget(4, total_steps=total))
    assert abs(sum(bits[:200]) - 4 * 200) > 8
    assert abs(sum(bits) - 4 * 500) <= 2


@pytest.mark.parametrize(("norms", "alpha"), each_value(["constant", "noisy"], [0.99, 0.98]))
def test_where_weights_are_known_the_rule_is_near_the_best(alpha, norms):
    """alpha says by how much later steps count more: a trend that is known goes into the bits from the first step on."""
    budget = Budget(4, alpha=alpha, total_steps=T)
    bits = taken(NORMS[norms], budget)
    log2 = NORMS[norms] + 0.5 * (T - 1 - np.arange(T)) * math.log2(alpha)
    made = sum(4.0**one * error_of(b) for one, b in zip(log2, bits, strict=True))
    assert made <= (1.2 if alpha == 0.99 else 1.45) * best_whole(log2, sum(bits))
    assert over_fixed(NORMS[norms], bits, alpha) < (0.75 if alpha == 0.99 else 0.3)
    assert np.mean(bits) == pytest.approx(4, rel=0.02)
    assert bits[T // 10] < 4 < bits[-1]


@pytest.mark.parametrize("norms", ["falls 16 times", "falls, noisy", "as alpha"])
def test_weights_that_rise_as_norms_fall_leave_bits_as_they_are(norms):
    """Where a problem shrinks errors, its gradients shrink as well: alike, and all steps count the same."""
    log2 = {**NORMS, "as alpha": 0.5 * np.arange(T) * math.log2(0.99)}[norms]
    assert over_fixed(log2, taken(log2, Budget(4, alpha=0.99, total_steps=T)), 0.99) <= 1.05


@pytest.mark.parametrize("seed", range(12))
def test_no_sizes_below_the_first_make_it_much_worse_than_fixed_bits(seed):
    """Levels that change at random, noise, and both: the sum of errors is insured, by sizes that are known beforehand."""
    rng = np.random.default_rng(seed)
    jumps = np.repeat(rng.uniform(-4, 0, 20), 20) * (seed % 3 != 0)
    log2 = np.minimum(0, jumps + rng.normal(0, (0.2, 0.7)[seed % 2], T))
    log2[0] = 0.0
    for total in (None, T):
        for known in (True,) if seed % 2 else (False, True):
            assert over_fixed(log2, taken(log2, Budget(4, total_steps=total), known=known)) <= 1.05


def test_the_history_goes_on_as_it_was():
    """Through JSON: nothing else is needed, between choosing bits and telling what they were for."""
    log2 = NORMS["swings"]
    one = Budget(4.5, alpha=0.999, total_steps=T)
    taken(log2[:200], one)
    one.choose()
    other = Budget(4.5, alpha=0.999, total_steps=T)
    other.history = History(**json.loads(json.dumps(asdict(one.history))))
    for each in (one, other):
        each.account(1.0, 4)
    assert taken(log2[200:], one) == taken(log2[200:], other)


@pytest.mark.parametrize("size", [0.0, math.nan, math.inf])
def test_no_gradient_changes_no_bits_but_takes_them(size):
    tuner = DQ(target_bits=4).tuner()
    tuner.tell(1.0)
    before = tuner.codec
    tuner.tell(size)
    tuner.fit(size)
    assert tuner.codec == before
    assert tuner.state()["steps"] == 3


def test_a_constant_gradient_is_plain_qsgd():
    for each in ("tell", "fit"):
        tuner = DQ(target_bits=4).tuner()
        for _ in range(50):
            getattr(tuner, each)(3.0)
            assert tuner.codec == DQ(target_bits=4).at(4)


@pytest.mark.parametrize("dq", [DQ(target_bits=4.5), DQ(target_error=2.0, alpha=0.9, total_steps=60)], ids=str)
def test_the_tuner_goes_on_from_its_state(dq):
    one, other = dq.tuner(), dq.tuner()
    for step in range(20):
        one.tell(float(gaussian(step, 1).exp()))
        one.fit(float(gaussian(step, 1).exp()))
    other.load(json.loads(json.dumps(one.state())))
    for step in range(20, 40):
        size = float(gaussian(step, 1).exp())
        for each in (one, other):
            each.tell(size)
            each.fit(size)
        assert one.codec == other.codec
