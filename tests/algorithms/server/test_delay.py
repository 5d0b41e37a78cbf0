"""Injected staleness is what was asked for, and the ramp grows to it."""

import itertools

import pytest
import torch

from paceline.algorithms.server.apply import SGD, ApplyRule, StalenessScaled
from paceline.algorithms.server.delay import ConstantDelay, DelayQueue, RandomDelay, RecordedDelay
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.registries import delay_registry
from paceline.algorithms.server.update import UpdateInfo
from paceline.errors import UsageError


def staleness_of_one_worker(delay, steps):
    """A worker that reads the newest version, and whose gradients wait: staleness of every update."""
    queue, version, seen = DelayQueue(delay), 0, []
    for _ in range(steps):
        for version_read in queue.put(version):
            seen.append(version - version_read)
            version += 1
    return seen, queue


@pytest.mark.parametrize("d", [0, 1, 2, 20])
def test_a_constant_delay_is_the_staleness(d):
    seen, queue = staleness_of_one_worker(ConstantDelay(updates_late=d), 100)
    assert seen == [min(n, d) for n in range(100 - d)]
    assert len(queue.waiting) == d


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("constant(updates_late=-1)", "updates_late of ConstantDelay must be 0 or more"),
        ("constant(updates_late=3, ramp_updates=-1)", "ramp_updates of ConstantDelay must be 0 or more"),
        ("random(lowest=4, highest=3)", "above highest (3): raise highest"),
        ("recorded(delays=0-3)", "as 0_3_1"),
    ],
)
def test_what_is_no_delay_is_refused_with_a_remedy(spec, remedy):
    with pytest.raises(UsageError) as error:
        delay_registry.build(spec)
    assert remedy in str(error.value)


def test_random_delays_are_uniform_and_repeatable():
    delay = RandomDelay(lowest=3, highest=7, seed=1)
    drawn = [delay.updates(n) for n in range(5000)]
    assert drawn == [delay.updates(n) for n in range(5000)]
    assert drawn != [RandomDelay(lowest=3, highest=7, seed=2).updates(n) for n in range(5000)]
    for value in range(3, 8):
        assert drawn.count(value) == pytest.approx(1000, rel=0.15)
    seen, queue = staleness_of_one_worker(delay, 5000)
    assert sum(seen) / len(seen) == pytest.approx(5, rel=0.02)
    assert len(seen) + len(queue.waiting) == 5000


def test_recorded_delays_overtake_each_other_and_begin_again():
    queue = DelayQueue(RecordedDelay.of([2, 0, 1]))
    assert [queue.put(n) for n in range(6)] == [[], [1], [0], [2], [4], [3]]
    assert [n for _, _, n in queue.waiting] == [5]


def test_what_is_due_together_comes_longest_due_first():
    queue = DelayQueue(RecordedDelay.of([3, 1, 1, 0]))
    assert [queue.put(n) for n in range(4)] == [[], [], [1], [0, 2, 3]]


def test_the_ramp_grows_in_proportion():
    ramped = ConstantDelay(updates_late=20, ramp_updates=100)
    assert [ramped.updates(n) for n in (0, 4, 5, 50, 99, 100, 1000)] == [0, 0, 1, 10, 19, 20, 20]
    seen, _ = staleness_of_one_worker(ramped, 400)
    assert seen[0] == 0
    assert seen[-1] == 20
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(seen))


def play(rule: ApplyRule, steps: int, learning_rate: float = 0.1):
    """Gradient descent on x^2 / 2 by one worker."""
    x, path = torch.ones(1, dtype=torch.float64), []
    applier = rule.start(1, torch.float64)
    for step in range(steps):
        path.append(float(x))
        gradient = x.clone()
        info = UpdateInfo(worker_id=0, sequence=step, step=step, version_read=step, version=step, num_samples=1)
        applier.apply(x, gradient, info, learning_rate)
        gradient.fill_(float("nan"))  # the caller's memory is used again
    return path


def test_a_delayed_rule_is_gradient_descent_with_old_gradients():
    path = play(Delayed(delay=ConstantDelay(updates_late=3)), 30)
    expected = [1.0]
    for step in range(29):
        expected.append(expected[-1] - (0.1 * expected[step - 3] if step >= 3 else 0.0))
    assert path == pytest.approx(expected, rel=1e-12)
    assert play(Delayed(delay=ConstantDelay(updates_late=0)), 30) == play(SGD(), 30)


def test_the_rule_within_sees_the_wait_as_staleness():
    fast, scaled = (
        play(Delayed(delay=ConstantDelay(updates_late=4), rule=rule), 6) for rule in (SGD(), StalenessScaled())
    )
    assert 1 - fast[5] == pytest.approx(0.1)
    assert 1 - scaled[5] == pytest.approx(0.1 / 4)


def test_specs():
    for delay in (
        ConstantDelay(updates_late=20, ramp_updates=500),
        RandomDelay(highest=40, seed=3),
        RecordedDelay.of([0, 3, 1]),
        RecordedDelay.of([3]),
    ):
        assert delay_registry.build(delay_registry.spec(delay)) == delay
    for impossible in (
        "constant(updates_late=-1)",
        "constant(updates_late=1, ramp_updates=-1)",
        "random(lowest=5, highest=4)",
        "recorded(delays=3-4)",
    ):
        with pytest.raises(ValueError, match=r"must be|above highest"):
            delay_registry.build(impossible)
