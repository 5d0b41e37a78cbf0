"""What has a unit may have any size: a gradient, a loss or a time that is multiplied by a number multiplies what comes of it.

No constant in the code may stand beside such a quantity, unless it has the same unit and says why. Left out are those that
have: AdaGrad's and Adam's `eps` and first sums, which are arguments; `fp16`, whose range is its card's; times beside the
resolution of a clock.
"""

import math

import numpy as np
import pytest
import torch
from scipy.stats import expon, pareto, truncnorm

from compression.worlds import UNBIASED, WITH_MEMORY, gaussian
from paceline.advice.calibration.fits import compute_time, slow_links, slow_workers
from paceline.advice.calibration.measurements import Link
from paceline.algorithms.merges import MeanOfModels, OuterStep
from paceline.algorithms.server.noise import NoiseMeter
from paceline.compression.bf16 import BFloat16
from paceline.compression.dq import DQ
from paceline.compression.qsgd import QSGD
from paceline.compression.ternary import Ternary
from paceline.observe.drawing import log_axis
from paceline.optim.outer import Nesterov, OuterSGD
from paceline.planner.backups import plan_arrivals, plan_backups
from paceline.planner.balance import Layer, balance
from paceline.planner.convergence_model import ConvergenceModel, Curve
from paceline.planner.failures import availability, expected_s
from paceline.planner.layout_choice import Candidate, choose_layouts
from paceline.planner.optimum import estimate_optimum
from paceline.planner.order_statistics import RecordedTimes, step_times
from paceline.planner.system_model import SystemModel

FACTORS = [1e-22, 1e-6, 1e6, 1e22]
DRAWN = np.random.default_rng(3)
TIMES = DRAWN.exponential(1.0, 60) + 1
CURVES = [(i, 2.0 / np.sqrt(i) + 0.3 + 0.002 * DRAWN.random(i.size)) for i in (np.arange(1.0, 200), np.arange(1.0, 90))]


# Codecs: powers of two change no bit


@pytest.mark.parametrize("exponent", [-90, -66, -20, 20, 66, 90])
@pytest.mark.parametrize("codec", [*UNBIASED, Ternary(), *WITH_MEMORY, BFloat16()], ids=str)
def test_codecs_give_a_scaled_vector_and_memory(codec, exponent):
    x, factor = gaussian(1, 1500), 2.0**exponent
    found = []
    for one in (x, factor * x):
        memory = codec.start(len(x), x.dtype)
        decoded = [codec.decode(codec.encode(one, memory, key), len(x), x.dtype) for key in (5, 6)]
        found.append([*decoded, *([] if memory is None else [memory])])
    assert all(torch.equal(factor * one, other) for one, other in zip(*found, strict=True))


# The rest: what comes of `factor` times the input is the factor to this power times what comes of the input


def _noise_meter(c):
    meter, gradient = NoiseMeter(4), gaussian(1, 200)
    for step in range(400):
        meter.take(c * (gradient + 5 * gaussian(step, 200)))
    return [meter.gradients]


def _system(relative):
    def of(c):
        workers = [1, 1, 2, 2, 4, 4, 8, 8]
        times = c * np.array([9.0, 9.2, 5.1, 5.0, 3.3, 3.2, 2.9, 3.0])
        model = SystemModel.fit(workers, times, relative=relative)
        found = [model.predict(m) for m in (1, 3, 8, 16)]
        return [x for one in found for x in (one.value, one.high)]

    return of


def _convergence(c):
    curves = [Curve(workers=m, iterations=i, losses=c * losses) for m, (i, losses) in zip((1, 4), CURVES, strict=True)]
    model = ConvergenceModel.fit(curves)
    return [model.predict(300, 1).value, model.predict(300, 4).value, model.optimum]


def _iterations_to(c):
    curves = [Curve(workers=m, iterations=i, losses=c * losses) for m, (i, losses) in zip((1, 4), CURVES, strict=True)]
    return [ConvergenceModel.fit(curves).iterations_to(0.5 * c, 4).value]


def _steps(law_of):
    def of(c):
        return step_times(law_of(c), [1.0, 1.0, 1.3, 2.0], 2).ravel().tolist()

    return of


def _tuned_bits(c):
    tuner, bits = DQ(target_bits=4).tuner(), []
    for step in range(60):
        tuner.tell(tuner.size_of(c * (1 + 3 * math.sin(step)) * gaussian(step, 600)))
        bits.append(tuner.codec.plain.bits)
    return bits


def _layouts(c):
    chain = [Candidate(layer=Layer(name=str(n), ifm=512, ofm=512), can_cut=True, follows=n > 0) for n in range(3)]
    found = choose_layouts(
        chain, nodes=4, batch=64, latency_s=c * 1e-5, bytes_per_s=1e9 / c,
        compute_s=lambda layer, points: c * 1e-9 * layer.operations(points),
    )  # fmt: skip
    return [one.time_s for one in found]


def _balance(c):
    layers = [Layer(name="a", ifm=512, ofm=512), Layer(name="b", ifm=512, ofm=10)]
    found = balance(layers, nodes=4, batch=64, operations_per_s=c * 1e12, bytes_per_s=c * 1e9)
    return [found.min_points, found.max_nodes, *(split.groups for split in found.splits)]


def _outer(outer):
    def of(c):
        x, momentum = c * gaussian(1, 5), None
        for step in range(3):
            x, momentum = outer.step(x, c * gaussian(step, 5), momentum)
        return x.tolist()

    return of


def _merged(rule_of):
    def of(c):
        x, sent, mean = (c * gaussian(seed, 5) for seed in (1, 2, 3))
        return rule_of(c).merged(0, x, sent, mean).tolist()

    return of


def _compute_time(times):
    def of(c):
        found = compute_time([1e-14 * c * times, 1.1e-14 * c * times], 0)  # a distribution is refused from 30 years on
        return [found if isinstance(found, float) else found.mean_s]

    return of


def _links(c):
    links = {(0, 1): Link(c * 1e-4, 1e9 / c), (0, 2): Link(c * 1e-4, 1e8 / c), (1, 2): Link(c * 1.1e-4, 1e9 / c)}
    return list(slow_links(links, 1_000_000).values())


def _log_axis(c):
    axis = log_axis(0.02 * c, 3.0 * c)
    return [10 ** (axis["range"][1] - axis["range"][0]), len(axis["tickvals"])]


FUNCTIONS = {
    "error bound of qsgd": (2, lambda c: [QSGD(norm="l2").error_bound(c * gaussian(1, 900))]),
    "bits of dq": (0, _tuned_bits),
    "gradients of an update by their noise": (0, _noise_meter),
    "optimum": (1, lambda c: [estimate_optimum([(i, c * losses) for i, losses in CURVES])]),
    "optimum above a bound": (1, lambda c: [estimate_optimum([(i, c * losses) for i, losses in CURVES], 0.25 * c)]),
    "optimum of a constant loss": (1, lambda c: [estimate_optimum([(np.arange(1.0, 9), np.full(8, 0.4 * c))])]),
    "loss after iterations": (1, _convergence),
    "iterations to a loss": (0, _iterations_to),
    "time of a step": (1, _system(False)),
    "time of a step, by relative errors": (1, _system(True)),
    "order statistics, exponential": (1, _steps(lambda c: expon(c * 0.5, c * 1.0))),
    "order statistics, normal": (1, _steps(lambda c: truncnorm(-4.0, math.inf, c * 2.0, c * 0.5))),
    "order statistics, Pareto": (1, _steps(lambda c: pareto(2.5, scale=c * 2.0))),
    "order statistics, recorded": (1, _steps(lambda c: RecordedTimes(c * TIMES))),
    "backups": (0, lambda c: [one.time_relative.value for one in plan_backups(RecordedTimes(c * TIMES), [1.0] * 8).rows]),
    "backups of arrivals": (0, lambda c: [one.time_relative.value for one in plan_arrivals(c * TIMES.reshape(10, 6)).rows]),
    "time with failures": (
        1, lambda c: [expected_s(100 * c, kills_per_s=0.01 / c, interval_s=10 * c, restart_s=5 * c)],
    ),
    "availability": (0, lambda c: [availability(kills_per_s=0.01 / c, restart_s=25 * c)]),
    "layouts": (1, _layouts),
    "balance": (0, _balance),
    "outer SGD": (1, _outer(OuterSGD(rate=0.7))),
    "outer Nesterov": (1, _outer(Nesterov())),
    "merge of models": (1, _merged(lambda c: MeanOfModels("corrected", 0.3))),
    "merge of changes": (1, _merged(lambda c: OuterStep(Nesterov(), 0.3, [c * gaussian(4, 5)]))),
    "slow workers": (0, lambda c: [*slow_workers([c * TIMES, 3 * c * TIMES])[1].values()]),
    "distribution of steps": (1, _compute_time(TIMES)),
    "recorded steps": (1, _compute_time(np.tile([1.0, 1.0, 4.0, 9.0], 30))),
    "constant steps": (1, _compute_time(np.full(60, 2.0))),
    "slow links": (0, _links),
    "logarithmic axis": (0, _log_axis),
}  # fmt: skip


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_follow_their_unit(name, factor):
    degree, function = FUNCTIONS[name]
    expected, found = np.array(function(1.0), float), np.array(function(factor), float)
    assert expected.size
    assert np.isfinite(expected).any()
    np.testing.assert_allclose(found / factor**degree, expected, rtol=1e-3)
