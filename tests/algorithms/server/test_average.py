"""The moving average of parameters."""

import pytest
import torch

from paceline.algorithms.server.average import MovingAverage


def path(length):
    return torch.randn(length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_is_the_weighted_sum():
    xs = path(30)
    average = MovingAverage(xs[0], decay=0.9, warm_up=False)
    for x in xs[1:]:
        average.update(x)
    weights = torch.tensor([0.9**29] + [0.1 * 0.9 ** (29 - n) for n in range(1, 30)], dtype=torch.float64)
    assert float(weights.sum()) == pytest.approx(1)
    torch.testing.assert_close(average.x, (weights[:, None] * xs).sum(0), rtol=1e-12, atol=1e-12)


def test_a_short_run_forgets_where_it_began():
    average, cold = (MovingAverage(torch.zeros(1), warm_up=warm_up) for warm_up in (True, False))
    for _ in range(50):
        average.update(torch.ones(1))
        cold.update(torch.ones(1))
    assert float(average.x) > 0.999
    assert float(cold.x) < 0.01


@pytest.mark.parametrize("decay", [0.5, 0.9999])
def test_the_warm_up_is_tensorflows(decay):
    xs = path(30)
    average, expected = MovingAverage(xs[0], decay), xs[0].clone()
    for n, x in enumerate(xs[1:], start=1):
        average.update(x)
        own = min(decay, (1 + n) / (10 + n))
        expected = own * expected + (1 - own) * x
        torch.testing.assert_close(average.x, expected, rtol=0, atol=1e-13)


def test_the_warm_up_ends_at_the_decay():
    average = MovingAverage(torch.zeros(1, dtype=torch.float64), decay=0.5)
    for _ in range(100):
        average.update(torch.zeros(1, dtype=torch.float64))
    average.update(torch.ones(1, dtype=torch.float64))
    assert float(average.x) == 0.5


def test_a_snapshot_goes_on_bit_for_bit_and_the_start_is_a_copy():
    xs = path(20)
    first = xs[0].clone()
    average, resumed = MovingAverage(first), MovingAverage(torch.zeros(4, dtype=torch.float64))
    first.zero_()
    assert torch.equal(average.x, xs[0])
    for x in xs[:10]:
        average.update(x)
    resumed.x.copy_(average.x)
    resumed.updates.copy_(average.updates)
    for x in xs[10:]:
        average.update(x)
        resumed.update(x)
    assert torch.equal(average.x, resumed.x)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_refuses_impossible_decays(decay):
    with pytest.raises(ValueError, match="decay"):
        MovingAverage(torch.zeros(1), decay=decay)
