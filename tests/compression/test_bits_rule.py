"""DQ-SGD's rule against the optimum that a solver finds, and step by step."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from compression.worlds import gaussian
from paceline.compression.bits_rule import BudgetRule, bits_of, factor_for_budget, factor_for_error, total_error
from paceline.compression.dq import DQ, AtBits

STEPS = 60
SIZES = {
    "constant": np.zeros(STEPS),
    "falling": np.linspace(0, -3.3, STEPS),
    "swinging": 2 * np.sin(np.arange(STEPS) / 5),
    "with steps": np.repeat([0.0, -2.0, 1.0], STEPS // 3),
}


def weighted(sizes, alpha):
    return sizes + 0.5 * (STEPS - np.arange(STEPS)) * math.log2(alpha)


@pytest.mark.parametrize("alpha", [1.0, 0.98])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bits", [3.0, 4.0, 6.0])
def test_within_a_hundredth_of_the_numerical_optimum(sizes, alpha, bits):
    """Least sum of bits at the error that the rule makes, over real numbers of levels."""
    log2 = weighted(SIZES[sizes], alpha)
    factor = factor_for_budget(list(log2), bits)
    levels = factor + log2
    spent = sum(bits_of(one) for one in levels)
    assert spent == pytest.approx(bits * STEPS)
    error = total_error(list(log2), list(levels))

    def cost(u):
        return float(np.sum(np.log2(2.0**u + 1) + 1))

    def slope(u):
        return 2.0**u / (2.0**u + 1)

    errors = {
        "type": "ineq",
        "fun": lambda u: 1 - float(np.sum(4.0 ** (log2 - u))) / 4 / error,
        "jac": lambda u: 2 * math.log(2) * 4.0 ** (log2 - u) / 4 / error,
    }
    found = minimize(cost, levels, jac=slope, constraints=[errors], method="SLSQP", options={"maxiter": 500})
    assert total_error(list(log2), list(found.x)) <= error * 1.001
    assert found.fun <= spent + 1e-6
    assert spent <= found.fun * 1.01


def test_a_target_error_is_what_every_step_makes():
    log2 = weighted(SIZES["swinging"], 0.99)
    levels = factor_for_error(0.01) + log2
    assert total_error(list(log2), list(levels)) == pytest.approx(0.01 * STEPS)


@pytest.mark.parametrize("target", [2.5, 4.0, 5.3])
def test_whole_bits_keep_to_the_budget(target):
    rng, rule = np.random.default_rng(0), BudgetRule(target, 2, 8)
    bits = [rule.next(size) for size in rng.normal(0, 0.7, 3000)]
    assert set(map(type, bits)) == {int}
    assert np.mean(bits) == pytest.approx(target, abs=0.1)
    assert len(set(bits)) > 2


@pytest.mark.parametrize("by", [3.0, -3.0])
@pytest.mark.parametrize("steps", [300, 3000])
def test_the_budget_holds_though_gradients_keep_growing_or_shrinking(by, steps):
    rule = BudgetRule(4, 2, 8)
    assert np.mean([rule.next(size) for size in np.linspace(0, by, steps)]) == pytest.approx(4, abs=0.15)


def test_more_bits_where_the_gradient_is_larger():
    rule = BudgetRule(4, 2, 8)
    for _ in range(200):
        rule.next(0.0)
    assert [rule.next(size) for size in (2.0, -1.0)] == [6, 3]


def test_a_constant_gradient_is_plain_qsgd():
    tuner = DQ(target_bits=4).tuner()
    for _ in range(50):
        tuner.tell(3.0)
        assert tuner.codec == DQ(target_bits=4).at(4)


def test_the_tuner_goes_on_from_its_state():
    one, other = DQ(target_bits=4.5).tuner(), DQ(target_bits=4.5).tuner()
    for step in range(20):
        one.tell(float(gaussian(step, 1).exp()))
    other.load(one.state())
    for step in range(20, 40):
        size = float(gaussian(step, 1).exp())
        one.tell(size)
        other.tell(size)
        assert one.codec == other.codec


def test_a_target_error_bounds_the_error():
    dq, x = DQ(target_error=2.0, max_bits=8), gaussian(3, 4000)
    tuner = dq.tuner()
    tuner.tell(tuner.size_of(x))
    codec = tuner.codec
    assert isinstance(codec, AtBits)
    assert codec.plain.error_bound(x) <= 2.0
    assert dq.at(codec.plain.bits - 1).plain.error_bound(x) > 2.0


@pytest.mark.parametrize("size", [0.0, math.nan, math.inf])
def test_no_gradient_changes_no_bits(size):
    tuner = DQ(target_bits=4).tuner()
    tuner.tell(1.0)
    before = tuner.codec
    tuner.tell(size)
    assert tuner.codec == before
