"""The page on DQ-SGD: its optimum against a solver, its best whole bits against all there are, and a run, small."""

import dataclasses
import importlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from paceline.compression.registry import codec_registry

FIDELITY = Path(__file__).parents[2] / "benchmarks" / "fidelity"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FIDELITY))
        patch.setattr(codec_registry, "_classes", dict(codec_registry._classes))  # it adds one
        yield importlib.import_module("dq_sgd")


def total(sizes, levels):
    return float(np.sum(4.0 ** (sizes - levels)) / 4)


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
def test_the_papers_rule_is_within_a_hundredth_of_the_numerical_optimum(script, sizes, alpha, bits):
    """Least sum of bits at the error that the rule makes, over real numbers of levels."""
    log2 = weighted(SIZES[sizes], alpha)
    factor = script.factor_for_budget(list(log2), bits)
    levels = factor + log2
    error = script.total_error(list(log2), list(levels))

    def cost(u):
        return float(np.sum(np.log2(2.0**u + 1) + 1))

    spent = cost(levels)
    assert spent == pytest.approx(bits * STEPS)

    def slope(u):
        return 2.0**u / (2.0**u + 1)

    errors = {
        "type": "ineq",
        "fun": lambda u: 1 - float(np.sum(4.0 ** (log2 - u))) / 4 / error,
        "jac": lambda u: 2 * math.log(2) * 4.0 ** (log2 - u) / 4 / error,
    }
    found = minimize(cost, levels, jac=slope, constraints=[errors], method="SLSQP", options={"maxiter": 500})
    assert script.total_error(list(log2), list(found.x)) <= error * 1.001
    assert found.fun <= spent + 1e-6
    assert spent <= found.fun * 1.01


@pytest.mark.parametrize("bits", [2.5, 4.0, 7.0])
def test_no_other_levels_need_fewer_bits_for_the_same_error(script, bits):
    """Whatever is drawn around any levels takes more, at an equal sum of errors."""
    draws = np.random.default_rng(0)
    sizes = draws.normal(0, 1.5, 30)
    levels = math.log2(2.0 ** (bits - 1) - 1) + sizes - sizes.mean()
    least = script.needed_bits(sizes, total(sizes, levels))
    for _ in range(200):
        other = levels + draws.normal(0, 0.5, 30)
        other += 0.5 * math.log2(total(sizes, other) / total(sizes, levels))
        assert total(sizes, other) == pytest.approx(total(sizes, levels))
        assert np.mean(np.log2(2.0**other + 1) + 1) > least
    equal = np.zeros(10)
    assert script.needed_bits(equal, total(equal, equal + 3)) == pytest.approx(math.log2(2.0**3 + 1) + 1)


def test_the_best_whole_bits_are_the_best_of_all(script):
    sizes = np.array([0.0, 1.3, -0.7, 2.0])
    for spent in (9, 12, 17):
        every = (
            script.total_error(list(sizes), [math.log2(2.0 ** (one - 1) - 1) for one in bits])
            for bits in itertools.product(range(2, 9), repeat=4)
            if sum(bits) == spent
        )
        assert script.best_whole(sizes, spent) == pytest.approx(min(every))


def test_paired_differences_have_their_interval(script):
    assert script.interval([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]) == (1.0, 0.0)
    mean, half = script.interval([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert script.interval([1.0, math.inf, 3.0], [0.0, 0.0, 0.0]) == (math.inf, 0.0)


@pytest.fixture
def news(script):
    return dataclasses.replace(script.PROBLEMS[0], steps=12)


def test_a_run_has_the_bits_of_its_codec_and_learns(script, news):
    """Two classes that a feature tells apart."""
    draws = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (256,), generator=draws)
    x = torch.zeros(256, news.model()[0].in_features)
    x[torch.arange(256), y] = 1.0
    data = script.Data(x, y, x[:100], y[:100])
    plain, coded, again = (
        script.train(news, one, data, 0, rate=1.0) for one in ("all-reduce", script.FIXED[2], "all-reduce")
    )
    assert plain == again
    assert plain.bits == 32.0
    assert 4.0 < coded.bits < 4.3
    assert plain.loss < 1.2 < math.log(4)


def test_images_are_trained_on_with_dq(script):
    """Two classes that their brightness tells apart, with the network of CIFAR-10."""
    images = dataclasses.replace(script.PROBLEMS[1], steps=16, batch=4)
    y = torch.arange(32) % 2
    x = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.1 + (2.0 * y - 1).view(-1, 1, 1, 1)
    found = script.train(images, "all-reduce(codec=dq(target_bits=4))", script.Data(x, y, x, y), 0, rate=0.05)
    assert found.loss < 1.2 < math.log(10)
    assert 3.0 < found.bits < 5.0


def test_an_evaluation_is_over_all_samples(script):
    """1,100 in pieces: the mean is that of all, though the last piece is smaller."""
    model = torch.nn.Linear(3, 4)
    draws = torch.Generator().manual_seed(1)
    x, y = torch.randn(1100, 3, generator=draws), torch.randint(0, 4, (1100,), generator=draws)
    loss, accuracy = script.evaluated(model, x, y)
    outputs = model(x).detach()
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, y)), rel=1e-5)
    assert accuracy == pytest.approx(float((outputs.argmax(1) == y).double().mean()), abs=1e-12)


def test_a_run_that_is_in_the_file_is_not_made_again(script, news, tmp_path, monkeypatch):
    runs = []

    def train(problem, algorithm, data, seed, rate):
        runs.append((problem.name, algorithm, seed, rate))
        return script.Found(bits=4.0, loss=0.5 + seed, accuracy=0.75)

    monkeypatch.setattr(script, "train", train)
    file = tmp_path / "runs.jsonl"
    first = [script.made(news, "all-reduce", None, seed, 1.0, file) for seed in (0, 1)]
    assert [script.made(news, "all-reduce", None, seed, 1.0, file) for seed in (0, 1)] == first
    assert script.made(news, "local-sgd", None, 0, 1.0, file) == first[0]
    assert script.made(dataclasses.replace(news, name="other"), "all-reduce", None, 0, 1.0, file) == first[0]
    assert script.made(news, "all-reduce", None, 0, 2.0, file) == first[0]
    own = ("AG News", "all-reduce", 0, 1.0)
    others = [("AG News", "local-sgd", 0, 1.0), ("other", "all-reduce", 0, 1.0), ("AG News", "all-reduce", 0, 2.0)]
    assert runs == [own, ("AG News", "all-reduce", 1, 1.0), *others]


def test_the_rate_is_half_of_the_best_of_float32(script, news, monkeypatch):
    ends = {1.0: 0.9, 2.0: 0.7, 4.0: 0.8, 8.0: math.nan}

    def made(problem, algorithm, data, seed, rate, file):
        assert (algorithm, seed in script.SEEDS) == ("all-reduce", False)
        return script.Found(32.0, ends[rate], 0.5)

    monkeypatch.setattr(script, "made", made)
    assert script.chosen_rate(news, None, None) == 1.0
    ends[1.0] = 0.6
    with pytest.raises(AssertionError, match="outside of those tried"):
        script.chosen_rate(news, None, None)


def test_every_method_and_control_can_be_built(script):
    import paceline as pl

    for spec in (*script.METHODS, *script.CONTROLS, *script.CONTROLS.values()):
        assert pl.spec(pl.parse(spec))
    assert len(script.FIXED) == 7
