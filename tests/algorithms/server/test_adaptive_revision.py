"""AdaptiveRevision with delay: the formulas written out, both forms, and what the server must keep."""

import random

import pytest
import torch

from paceline.algorithms.server.adaptive_revision import AdaptiveRevision
from paceline.algorithms.server.update import UpdateInfo

P, RATE = 3, 0.4


def info(worker, read, version, echo=None):
    return UpdateInfo(
        worker_id=worker, sequence=0, step=0, version_read=read, version=version, num_samples=1, echo=echo
    )


def by_hand(x, events):
    """The definition, one element and one plain number at a time. events: (gradient, version read), applied in order."""
    x, history = list(map(float, x)), []
    z, z_max = [1.0] * P, [1.0] * P
    for gradient, read in events:
        for i in range(P):
            g = float(gradient[i])
            overlap = sum(float(earlier[i]) for earlier in history[read:])
            rate_old = RATE / z_max[i] ** 0.5
            z[i] += g * g + 2 * g * overlap
            z_max[i] = max(z_max[i], z[i])
            rate = RATE / z_max[i] ** 0.5
            x[i] += -rate * g + (rate_old - rate) * overlap
        history.append(gradient)
    return torch.tensor(x, dtype=torch.float64)


def play(revision_state, workers, updates, seed):
    """Workers read and send in random order; returns x, what was applied, and the applier."""
    draws = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    applier = AdaptiveRevision(revision_state=revision_state).start(P, torch.float64)
    x, events, holds = torch.zeros(P, dtype=torch.float64), [], {}
    while len(events) < updates:
        worker, version = draws.randrange(workers), len(events)
        if worker in holds:
            read, echo = holds.pop(worker)
            gradient = torch.randn(P, dtype=torch.float64, generator=generator)
            assert applier.accepts(info(worker, read, version))
            applier.apply(x, gradient, info(worker, read, version, echo), RATE)
            events.append((gradient, read))
        else:
            echo = applier.read(worker, version)
            holds[worker] = (version, None if echo is None else echo.clone())
    return x, events, applier


@pytest.mark.parametrize("revision_state", ["echo", "snapshot"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_is_the_definition(revision_state, workers):
    x, events, _ = play(revision_state, workers, updates=60, seed=workers)
    assert workers == 1 or max(version - read for version, (_, read) in enumerate(events)) >= workers - 1
    torch.testing.assert_close(x, by_hand(torch.zeros(P), events), rtol=1e-12, atol=1e-12)


def test_both_forms_are_equal_bit_for_bit():
    echo, _, _ = play("echo", 8, updates=200, seed=3)
    snapshot, _, _ = play("snapshot", 8, updates=200, seed=3)
    assert torch.equal(echo, snapshot)


def test_a_gradient_that_overlaps_with_its_equal_is_revised_to_the_rate_of_both():
    """Two equal gradients at one version: the step of both is that of AdaGrad if it had known both, -2 rate g."""
    applier = AdaptiveRevision().start(1, torch.float64)
    x, g = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    echo = applier.read(0, 0)
    assert echo is not None
    echo = echo.clone()
    applier.apply(x, g, info(0, 0, 0, echo), 1.0)
    applier.apply(x, g, info(1, 0, 1, echo), 1.0)
    # z = 1 + 1, then + 1 + 2 = 5 = 1 + (g + g)^2
    assert float(x) == pytest.approx(-2 / 5**0.5, rel=1e-14)


def test_snapshots_live_as_long_as_an_answer_may_come():
    rule = AdaptiveRevision(revision_state="snapshot", reads_kept=2)
    applier = rule.start(P, torch.float64)
    x, g = torch.zeros(P, dtype=torch.float64), torch.ones(P, dtype=torch.float64)
    applier.read(0, 0)
    applier.read(1, 0)
    applier.apply(x, g, info(0, 0, 0), RATE)
    applier.read(0, 1)
    assert applier.accepts(info(1, 0, 1)), "worker 1 has not answered yet"
    assert not applier.accepts(info(1, 1, 1)), "it never read version 1"
    applier.apply(x, g, info(0, 1, 1), RATE)
    assert not applier.accepts(info(0, 0, 2)), "worker 0 has answered a newer read"
    applier.forget(1)
    assert not applier.accepts(info(1, 0, 2))
    for version in range(2, 6):
        applier.read(1, version)
    assert [version for version in range(6) if applier.accepts(info(1, version, 6))] == [4, 5]
    assert len(applier._G_at) == 3  # 4 and 5 of worker 1; 1 of worker 0
    with pytest.raises(ValueError, match="worker 1 has never read version 2"):
        applier.apply(x, g, info(1, 2, 6), RATE)
    applier.load(applier.state())
    assert not applier.accepts(info(1, 5, 6)), "after a restart workers read again"


def test_the_echo_must_come_back():
    applier = AdaptiveRevision().start(P, torch.float64)
    with pytest.raises(ValueError, match="needs the state that the worker read"):
        applier.apply(torch.zeros(P, dtype=torch.float64), torch.ones(P, dtype=torch.float64), info(0, 0, 0), RATE)
