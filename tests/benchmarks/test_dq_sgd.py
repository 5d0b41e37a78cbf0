"""The page on DQ-SGD: its optimum against a solver, its best whole bits against all there are, and a run, small."""

import importlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

FIDELITY = Path(__file__).parents[2] / "benchmarks" / "fidelity"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FIDELITY))
        yield importlib.import_module("dq_sgd")


def total(sizes, levels):
    return float(np.sum(4.0 ** (sizes - levels)) / 4)


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


def test_a_run_has_the_bits_of_its_codec_and_learns(script):
    """Two classes that a feature tells apart."""
    draws = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (256,), generator=draws)
    x = torch.zeros(256, script.FEATURES)
    x[torch.arange(256), y] = 1.0
    data = [x, y, x, y]
    plain, coded, again = (
        script.train(one, data, 0, steps=12) for one in ("all-reduce", script.FIXED[2], "all-reduce")
    )
    assert plain == again
    assert plain.bits == 32.0
    assert 4.0 < coded.bits < 4.3
    assert plain.loss < 1.2 < math.log(script.CLASSES)


def test_a_run_that_is_in_the_file_is_not_made_again(script, tmp_path, monkeypatch):
    runs = []

    def train(algorithm, data, seed):
        runs.append((algorithm, seed))
        return script.Found(bits=4.0, loss=0.5 + seed, accuracy=0.75)

    monkeypatch.setattr(script, "train", train)
    file = tmp_path / "runs.jsonl"
    first = [script.made("all-reduce", [], seed, file) for seed in (0, 1)]
    assert [script.made("all-reduce", [], seed, file) for seed in (0, 1)] == first
    assert script.made("local-sgd", [], 0, file) == first[0]
    assert runs == [("all-reduce", 0), ("all-reduce", 1), ("local-sgd", 0)]


def test_every_method_and_control_can_be_built(script):
    import paceline as pl

    for spec in (*script.METHODS, *script.CONTROLS, *script.CONTROLS.values()):
        assert pl.spec(pl.parse(spec))
    assert len(script.FIXED) == 7
