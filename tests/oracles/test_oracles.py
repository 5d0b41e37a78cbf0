"""The oracles on a few events, against figures computed by hand: x = 1 at first, rates are 1/2, and gradients x - c."""

import ast
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from oracles import (
    adaptive_revision,
    downpour,
    gossip,
    local_sgd,
    lockstep,
    outer,
    power,
    ringleader,
    server_rules,
    servers,
    shared_memory,
    step_sizes,
    waiting,
)  # fmt: skip
from oracles.events import Codec, Coded, Half, Step, Trace
from oracles.problem import FROZEN, PARTS, SHAPES, SIZE, START, Optimizer, X, Y, gradient

ONE = np.ones(SIZE)
ALL = np.ones(len(PARTS), dtype=bool)


@dataclass
class Made(Step):
    """A step whose gradient is x - c."""

    c: float = 0.0

    def gradient(self, x=None, clip=None):
        x = self.at[0] if x is None else x
        return x - self.c, ALL


def step(worker, number, c, read=0, ready=0, applied=0, samples=1, **more):
    return Made(worker, number, [[0] * samples], read=read, ready=ready, applied=applied, c=c, **more)


def trace(*steps, workers=2, **more):
    return Trace(workers, list(steps), dict.fromkeys(range(workers), ONE), **more)


def sgd():
    return Optimizer("sgd", 0.5)


def rounds(*targets):
    """Steps of workers in rounds; one tuple of c per worker."""
    return trace(*(
        step(worker, k + 1, c, k, k, k + 1) for worker, own in enumerate(targets) for k, c in enumerate(own)
    ))  # fmt: skip


def equals(vector, figure):
    assert vector == pytest.approx(np.full(SIZE, figure), abs=1e-12)


@pytest.mark.parametrize("file", sorted(Path(__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_imports_nothing_of_the_product(file):
    nodes = [one for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.Import | ast.ImportFrom)]
    names = {alias.name for one in nodes for alias in one.names} | {getattr(one, "module", None) for one in nodes}
    assert not {name for name in names if name and name.split(".")[0] in ("paceline", "torch", "composition")}


@pytest.mark.parametrize("samples", [[0, 3], [1, 2, 5]])
def test_gradient_is_the_slope_of_the_loss(samples):
    def loss(x):
        W, b, V = (x[part].reshape(shape) for part, shape in zip(PARTS, SHAPES.values(), strict=True))
        errors = X[samples] @ W.T + b + FROZEN - Y[samples]
        branch = X[samples] @ V.T if samples[0] % 2 == 0 else np.zeros(1)
        return ((errors**2).sum() + (branch**2).sum()) / 2 / len(samples)

    g, _ = gradient(START, samples)
    slopes = [(loss(START + 1e-6 * e) - loss(START - 1e-6 * e)) / 2e-6 for e in np.eye(SIZE)]
    assert g == pytest.approx(slopes, abs=1e-7)


def test_clips_after_passes_have_added_up():
    one = Step(0, 1, [[1], [3]])
    g, has = one.gradient(START, clip=0.5)
    assert np.linalg.norm(g) == pytest.approx(0.5, rel=1e-6)
    assert has.tolist() == [True, True, False]


def test_lockstep():
    events = trace(step(0, 1, 0, 0, 0, 1), step(1, 1, 3, 0, 0, 1, samples=3), step(0, 2, 0, 1, 1, 2))
    equals(lockstep.run(events, ONE, sgd()), (1 + 1.25 / 2) / 2)


def test_lockstep_with_error_feedback():
    """A codec that sends half: what is left goes along with the next vector, at the workers and at the mean."""
    sent = {0: {0: Coded(ONE, ONE / 2), 1: Coded(ONE * 1.375, ONE / 2)}}
    means = [Coded(ONE / 2, ONE / 4), Coded(ONE * 0.75, ONE / 2)]
    events = trace(step(0, 1, 0, 0, 0, 1), step(0, 2, 0, 1, 1, 2), workers=1, sent=sent, means=means)
    equals(lockstep.run(events, ONE, sgd(), codec=Codec(1e-12, remembers=True)), 1 - 1 / 8 - 1 / 4)
    with pytest.raises(AssertionError, match="codes of mean 1"):
        lockstep.run(events, ONE, sgd(), codec=Codec(1e-12, remembers=False))


def test_local_sgd():
    models = local_sgd.run(rounds((0, 0), (3, 3)), ONE, sgd, period=2)
    equals(models[0], (0.25 + 2.5) / 2)
    models = local_sgd.run(rounds((0, 0), (3, 3)), ONE, sgd, period=2, warmup=1)
    equals(models[0], (1.25 / 2 + 2.125) / 2)


@pytest.mark.parametrize(
    ("merge", "found"), [("paper", 0.125 / 4 + 1.375 * 3 / 4), ("corrected", 0.125 + 1.125 * 3 / 4), ("cocod", 1.25)]
)
def test_late_averages(merge, found):
    events = rounds((0, 0, 0), (3, 3, 3))
    equals(local_sgd.run(events, ONE, sgd, period=2, delay=1, local_weight=0.25, merge=merge)[0], found)


def test_late_averages_with_longer_steps():
    models = local_sgd.run(rounds((0,), (3,)), ONE, sgd, period=2, delay=1, local_weight=0.25, compensate=True)
    equals(models[0], 1 - 0.5 / (1 - 0.75 / 2))


def test_outer_steps():
    options = {"period": 1, "rate": 1.0, "momentum": 0.5, "fragments": 1, "delay": 0, "local_weight": 0.0}
    equals(outer.run(rounds((0,), (3,)), ONE, sgd, **options)[1], 1.375)
    equals(outer.run(rounds((0, 0), (3, 3)), ONE, sgd, **options)[1], 1.53125)


def test_fragments_in_turn():
    options = {"period": 2, "rate": 1.0, "momentum": None, "fragments": 2, "delay": 0, "local_weight": 0.0}
    assert [one.tolist() for one in outer.dealt(2)] == [[True, False, False], [False, True, True]]
    x = outer.run(rounds((0,), (3,)), ONE, sgd, **options)[0]
    assert (x[PARTS[0]].mean(), x[PARTS[1]].mean()) == (0.5, 1.25)
    x = outer.run(rounds((0, 0), (3, 3)), ONE, sgd, **options)[0]
    assert (x[PARTS[0]].mean(), x[PARTS[1]].mean()) == (1.375, 0.625)


def test_locked():
    events = trace(step(0, 1, 0, 0, 0, 1), step(1, 1, 3, 0, 1, 2))
    equals(shared_memory.locked(events, ONE, sgd), 1.5)
    equals(shared_memory.locked(events, ONE, sgd, factor=step_sizes.inverse), 1.0)


def test_leashed():
    """Worker 1 loses a race, and steps on the vector of before; or drops what its momentum has all the same."""
    decays = lambda: Optimizer("adamw", 0.5)  # noqa: E731
    events = trace(step(0, 1, 0, 0, 0, 1), step(1, 1, 3, 0, 0, 2))
    equals(shared_memory.leashed(events, ONE, decays), 1 - 0.5 / (1 + 1e-8) + 0.5 / (1 + 0.5e-8) - 2 * 0.5 * 0.01)
    equals(shared_memory.leashed(events, ONE, sgd, factor=step_sizes.inverse), 1.5)
    events = trace(step(0, 1, 0, 0, 0, 1), step(1, 1, 3, 0, 0, -1), step(1, 2, 3, 1, 1, 2))
    equals(shared_memory.leashed(events, ONE, lambda: Optimizer("momentum", 0.5)), 0.5 + (2.5 + 1.8) / 2)


def test_hogwild():
    torn = {"at": [ONE * 0.8], "before": ONE * 0.7}
    events = trace(step(0, 1, 0, 0, 0, 1, at=[ONE], before=ONE), step(1, 1, 3, 0, 1, 2, **torn))
    equals(shared_memory.hogwild(events, ONE, sgd), 1 - 0.5 + 1.1)
    equals(shared_memory.hogwild(events, ONE, sgd, factor=step_sizes.inverse), 1 - 0.5 + 0.55)


def test_step_sizes():
    assert step_sizes.exponential(4)(2, []) == pytest.approx(1 / 3)
    assert step_sizes.tail(0.5, 2)(1, [0] * 19) == 1
    assert step_sizes.tail(0.5, 2)(1, [0] * 15 + [1] * 5) == 1 + 0.5 * (1 - 1.5)
    weight = step_sizes.rescaled([(0, 9.0), *[(0, 1.0), (1, 3.0)] * 4, (0, 1.0), (1, 3.0), (0, None), (1, 3.0)])
    factors = [weight([step(0, 1, 0, applied=version)]) for version in range(1, 13)]
    assert factors == pytest.approx([1, 1, 1, 1, 1, 1, 1, 1, 2, 2 / 3, 2, 1])


def test_servers():
    events = trace(step(0, 1, 0, 0, 0, 1), step(1, 1, 3, 0, 0, 1, samples=3), step(0, 2, 0, 0, 1, 2))
    equals(servers.run(events, ONE, sgd()), 1.625 - 0.5)
    equals(servers.run(events, ONE, sgd(), linear=True), 2.25 - 0.5)


def test_gradients_that_wait():
    events = trace(step(0, 1, 0, 0, 0, 2), step(0, 2, 0, 1, 1, 3), step(0, 3, 0, 2, 2, -1), workers=1)
    equals(waiting.run(events, ONE, sgd()), 0.5 - 0.5)
    equals(waiting.run(events, ONE, sgd(), weight=lambda steps: steps[0].number), 0.5 - 1)


def test_ringleader():
    """A row of two gradients of worker 0 counts as much as worker 1's one; when that has left, worker 0 is alone."""
    events = trace(
        step(0, 1, 0, 0, 1, 2, ready_s=1.0), step(1, 1, 3, 0, 0, 1, ready_s=2.0), step(0, 2, 3, 0, 1, 2, ready_s=3.0),
        step(0, 3, 0, 2, 2, 3, ready_s=5.0), left_s={0: 6.0, 1: 4.0},
    )  # fmt: skip
    x2 = 1 + (1 / 2 + (1 / 2 + 2) / 2) / 2
    equals(ringleader.run(events, ONE, sgd()), x2 / 2)


def test_downpour():
    """Steps on 1 and 1/2 are pushed as one; what a dead worker has accrued is lost, what a worker ends with is not."""
    first, second = (step(0, number, 0, 0, 0, 1) for number in (1, 2))
    events = trace(first, second, step(0, 3, 3, 1, 0, 0), workers=1)
    rule = server_rules.Rule(0.5)
    equals(downpour.run(events, ONE, rule, sgd, fetch=2, push=2), 0.25)
    events.steps[2].applied = 2
    equals(downpour.run(events, ONE, rule, sgd, fetch=2, push=2), 0.25 + 2.75 / 2)


def test_adaptive_revision():
    """Two gradients of 1 that overlap: both come to have the rate that is right for the two together."""
    events = trace(step(0, 1, 0, 0, 0, 1), step(1, 1, 0, 0, 1, 2))
    equals(adaptive_revision.run(events, ONE, 0.5), 1 - 2 * 0.5 / 5**0.5)


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (server_rules.Rule(0.5), 1.0),
        (server_rules.AdaGrad(0.5, eps=0.0), 0.5 + 1 / 5**0.5),
        (server_rules.AdaGrad(0.5, initial=1.0, eps=0.0), 0.5 / 2**0.5 + 1 / 6**0.5),
        (server_rules.DualAveraging(0.5), 1.5 / 6**0.5),
        (server_rules.Momentum(0.5, beta=0.5), 0.5 + 1.25),
        (server_rules.Momentum(0.5, beta=0.5, nesterov=True), 0.75 + 0.5 * (2 + 1.25)),
        (server_rules.RMSProp(0.5, alpha=0.5, eps=0.0), 0.5 / 0.5**0.5 + 1 / 2.25**0.5),
        (server_rules.Adam(0.5, beta1=0.5, beta2=0.5, eps=0.0), 0.5 + 0.5 * (1.25 / 0.75) / (2.25 / 0.75) ** 0.5),
    ],
)
def test_rules_of_servers(rule, found):
    """After gradients of 1 and 2; a parameter without a gradient stays as it is."""
    has = ALL.copy()
    x = rule.step(rule.step(ONE, ONE, has), 2 * ONE, has)
    equals(x, 1 - (1.5 if type(rule) is server_rules.Rule else found))
    has[1] = False
    assert rule.step(x, ONE, has)[PARTS[1]].tolist() == x[PARTS[1]].tolist()


def test_d_psgd():
    models = gossip.d_psgd(rounds((0, 0), (3, 3)), ONE, sgd, gossip.ring)
    equals(models[0], 1.25 - 0.25)
    equals(models[1], 1.25 + 0.5)


def test_metropolis_weights():
    assert gossip.metropolis(gossip.ring, 4, 0)[0] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert gossip.metropolis(gossip.exponential, 5, 0)[4] == pytest.approx([1 / 4, 1 / 4, 0, 1 / 4, 1 / 4])
    assert gossip.metropolis(gossip.one_peer, 4, 1)[3] == pytest.approx([0, 1 / 2, 0, 1 / 2])


def test_ad_psgd():
    """Worker 0 steps from 1 to 1/2, and both come to 3/4; an exchange with a model that nobody had is found."""
    half = Half(0, ONE / 2, ONE)
    events = trace(step(0, 1, 0, 0, 0, 1), halves={0: [Half(1, ONE, ONE / 2)], 1: [half]})
    models = gossip.ad_psgd(events, ONE, sgd)
    equals(models[0], 0.75)
    equals(models[1], 0.75)
    events.halves[1] = [half._replace(there=ONE / 3)]
    with pytest.raises(AssertionError):
        gossip.ad_psgd(events, ONE, sgd)


def test_power():
    """A matrix of rank one is sent as it is; of any other, what is sent and what is kept add up to what was given."""
    rows, columns = SHAPES["weight"]
    rights = {"weight": np.ones((columns, 1))}
    of_rank_one = ONE.copy()
    of_rank_one[PARTS[0]] = np.outer(np.arange(1.0, rows + 1), np.arange(1.0, columns + 1)).ravel()
    means = power.LowRank(trace(workers=1), rights, 0)
    assert means.mean(0, {0: (of_rank_one, 1)}, ALL) == pytest.approx(of_rank_one)
    given = np.random.default_rng(0).normal(size=SIZE)
    sent = means.mean(1, {0: (given, 1)}, ALL)
    assert np.linalg.matrix_rank(sent[PARTS[0]].reshape(rows, columns)) == 1
    again = means.mean(2, {0: (np.zeros(SIZE), 1)}, ALL)
    assert np.linalg.matrix_rank(again[PARTS[0]].reshape(rows, columns)) == 1
    matrix = (given - sent)[PARTS[0]].reshape(rows, columns)
    left = again[PARTS[0]].reshape(rows, columns)
    assert (left * (matrix - left)).sum() == pytest.approx(0, abs=1e-12)  # a projection of what was kept
