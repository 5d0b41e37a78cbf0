"""`dq` over means and pushes: its errors are bounded by what is rounded, with the least bits."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch

from algorithms.server.test_pushed import RANGES, pushing, received
from compression.worlds import gaussian, means, ports_of, run_workers
from paceline.compression.coded_mean import CodedMean
from paceline.compression.dq import DQ, AtBits
from paceline.errors import AlgorithmWarning, NotFiniteWarning

SIZE = 1501
LEVELS = {bits: 2 ** (bits - 1) - 1 for bits in range(2, 9)}


def scaled(factors):
    return [factor * gaussian(worker, SIZE) for worker, factor in enumerate(factors)]


def outlier():
    x = scaled([0.01, 0.01, 0.01])
    x[1][700] = 40.0
    return x


def opposite():
    """Their mean is small: what is rounded first is not."""
    one, noise = 5 * gaussian(1, SIZE), 0.01 * gaussian(2, SIZE)
    return [one + noise, noise - one]


CASES = {  # vectors, weights
    "equal": (scaled([1.0] * 4), [1.0] * 4),
    "skewed": (scaled([20.0, 0.1, 0.1, 0.1]), [1.0] * 4),
    "opposite": (opposite(), [1.0, 1.0]),
    "outlier": (outlier(), [2.0, 1.0, 1.0]),
    "zero": (scaled([0.0] * 3), [1.0] * 3),
    "uneven weights": (scaled([8.0, 1.0, 1.0]), [1.0, 7.0, 24.0]),
    "without a batch": (scaled([1.0, 1000.0, 1.0]), [3.0, 0.0, 1.0]),
    "eight": (scaled([0.5 * one for one in range(8)]), [float(1 + one % 3) for one in range(8)]),
}


def size_of(x, pieces, bucket, norm):
    """4 s^2 times the bound of rounding x, cut into pieces, and these into buckets."""
    piece, total = -(-len(x) // (8 * pieces)) * 8, 0.0
    for begin in range(0, len(x), piece):
        part = x[begin : begin + piece].double().numpy()
        for first in range(0, len(part), bucket or len(part)):
            one = part[first : first + (bucket or len(part))]
            total += len(one) * float(np.abs(one).max() if norm == "linf" else np.sqrt(one @ one)) ** 2
    return total


def bound(dq, vectors, weights, bits):
    """Of the mean squared error with so many bits, from the vectors themselves."""
    used = [(w / sum(weights), x) for w, x in zip(weights, vectors, strict=True) if w]
    sizes = [size_of(x, len(vectors), dq.bucket, dq.norm) for _, x in used]
    own = sum(u**2 * size for (u, _), size in zip(used, sizes, strict=True))
    mean = sum(u * math.sqrt(size) for (u, _), size in zip(used, sizes, strict=True)) ** 2
    one = 1 / (4 * LEVELS[bits] ** 2)
    piece = -(-len(vectors[0]) // (8 * len(vectors))) * 8
    longest = min(piece, dq.bucket or piece) if dq.norm == "l2" else 0
    return (own + mean + longest * one * own) * one


def coded_steps(dq, vectors, weights, steps):
    """What all get in each step, and the bits."""

    def program(worker, ports):
        coded, found = CodedMean(dq, ports), []
        for _ in range(steps):
            x = vectors[worker].clone()
            coded.fit([x], weights[worker])
            assert isinstance(coded.tuner.codec, AtBits)
            bits = coded.tuner.codec.plain.bits
            coded.start(0, x, weights[worker]).wait()
            found.append((x, bits))
        return found

    results = run_workers(len(vectors), program, len(vectors[0]))
    for own in results[1:]:
        assert all(torch.equal(a, b) and m == n for (a, m), (b, n) in zip(own, results[0], strict=True))
    return results[0]


@pytest.mark.parametrize(
    ("case", "norm", "bucket"),
    [
        *((case, "linf", 512) for case in CASES),
        ("skewed", "l2", 64),
        ("opposite", "l2", 64),
        ("uneven weights", "linf", None),
    ],
)
def test_the_error_is_within_the_target_with_the_least_bits(case, norm, bucket):
    """Measured over 25 roundings of the same vectors; the bound itself is computed anew, from the vectors."""
    vectors, weights = CASES[case]
    dq = DQ(target_error=1.0, norm=norm, bucket=bucket)
    target = 1.1 * bound(dq, vectors, weights, 5) or 1.0
    dq = dataclasses.replace(dq, target_error=target)
    found = coded_steps(dq, vectors, weights, 25)
    exact = sum(w * x.double() for w, x in zip(weights, vectors, strict=True)) / sum(weights)
    errors = np.array([float((x.double() - exact).square().sum()) for x, _ in found])
    bits = {bits for _, bits in found}
    if case == "zero":
        assert (bits, errors.any()) == ({2}, False)
        return
    assert bits == {5}
    assert bound(dq, vectors, weights, 4) > target
    assert errors.mean() + 4 * errors.std() / math.sqrt(len(errors)) < target
    assert errors.mean() > target / (200 if case == "outlier" else 20)  # it is a bound of this, and not of anything


@pytest.mark.parametrize("share", [0.99, 1.01])
@pytest.mark.parametrize(("norm", "bucket", "bits"), [("linf", 512, 6), ("l2", None, 3)])
def test_one_bit_more_as_soon_as_the_bound_is_above_the_target(norm, bucket, bits, share):
    """Pieces have scales of their own; with one Euclidean norm and few bits, most is the first error, rounded anew."""
    vectors, weights = CASES["uneven weights"]
    dq = DQ(target_error=1.0, norm=norm, bucket=bucket)
    dq = dataclasses.replace(dq, target_error=bound(dq, vectors, weights, bits) / share)
    assert coded_steps(dq, vectors, weights, 1)[0][1] == (bits if share < 1 else bits + 1)


def test_the_vectors_of_a_step_share_the_target():
    """Two buckets, and a worker that one of them is left out of."""
    sizes = (1501, 600)

    def own(worker):
        xs = [(1 + worker) * gaussian(10 * worker + number, size) for number, size in enumerate(sizes)]
        if worker == 2:
            xs[1][5] = math.inf
        return xs

    def program(worker, ports):
        coded, xs = CodedMean(dq, ports), own(worker)
        coded.fit(xs, 1.0)
        for number, x in enumerate(xs):
            coded.start(number, x, 1.0).wait()
        return coded.tuner.codec.plain.bits, xs

    first, second = (list(one) for one in zip(*(own(worker) for worker in range(3)), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotFiniteWarning)
        for bits in (4, 6):
            dq = DQ(target_error=1.0, bucket=64)
            total = bound(dq, first, [1.0] * 3, bits) + bound(
                dq, [*second[:2], torch.zeros(600)], [1.0, 1.0, 0.0], bits
            )
            dq = dataclasses.replace(dq, target_error=1.001 * total)
            found = run_workers(3, program, 1501)
            assert [one for one, _ in found] == [bits] * 3
            assert all(x.isfinite().all() for _, xs in found for x in xs)


def test_a_step_is_bounded_by_its_own_gradients_and_not_by_those_before():
    dq = DQ(target_error=2.0)

    def program(worker, ports):
        coded, bits = CodedMean(dq, ports), []
        for factor in (0.005, 1.0, 0.005):
            x = factor * gaussian(worker, SIZE)
            coded.fit([x], 1.0)
            coded.start(0, x, 1.0).wait()
            bits.append(coded.tuner.codec.plain.bits)
        return bits

    for bits in run_workers(2, program, SIZE):
        vectors = [gaussian(worker, SIZE) for worker in range(2)]
        needed = next(one for one in LEVELS if bound(dq, vectors, [1.0, 1.0], one) <= 2.0)
        assert bits == [2, needed, 2]
        assert needed > 4


def test_where_the_most_bits_do_not_reach_the_target_it_is_said_once():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = coded_steps(DQ(target_error=1e-6), scaled([1.0, 1.0]), [1.0, 1.0], 3)
    assert [bits for _, bits in found] == [8] * 3
    assert [one.category for one in said] == [AlgorithmWarning]
    assert "max_bits=8 adds more to a step's squared error than dq's target_error=1e-06" in str(said[0].message)


def test_a_lone_worker_tells_nobody():
    coded = CodedMean(DQ(target_error=1.0), ports_of(0, 1, object()))
    coded.fit([gaussian(0, 50)], 1.0)


@pytest.mark.parametrize("left", [0, 8])
def test_a_target_counts_at_the_end(left):
    """alpha leaves a half of an error's square per two steps: eight steps before the end, a sixteenth."""
    dq = DQ(target_error=1.0, alpha=0.5**0.5, total_steps=1 + left)
    dq_bits = [bits for bits in LEVELS if 500.0 / (4 * LEVELS[bits] ** 2) * 0.5 ** (left / 2) <= 1.0]
    tuner = dq.tuner()
    tuner.fit(500.0)
    assert tuner.codec == dq.at(dq_bits[0])
    assert dq_bits[0] == (3 if left else 5)


# Pushes


def test_each_push_is_within_the_target_with_the_least_bits():
    dq = DQ(target_error=3.0, bucket=64)
    own, factors = pushing(dq), [1.0, 0.1, 3.0, 0.3, 0.0]
    for step, factor in enumerate(factors):
        gradient = factor * gaussian(step, 200)
        size = sum(size_of(gradient[begin:end], 1, 64, "linf") for begin, end in RANGES)
        least = next(bits for bits in LEVELS if size / (4 * LEVELS[bits] ** 2) <= 3.0)
        payloads = own.encode(gradient)
        assert {int(one[0]) for one in payloads} == {least}
        assert (received(dq, payloads) - gradient).square().sum() < 3.0


def test_a_push_that_needs_more_than_the_most_bits_is_said_once():
    own = pushing(DQ(target_error=1e-6))
    with pytest.warns(AlgorithmWarning, match="raise target_error, or take smaller buckets"):
        own.encode(gaussian(0, 200))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.encode(gaussian(1, 200))


def test_pushes_keep_to_the_budget_and_follow_the_gradient():
    own, bits, sizes = pushing(DQ(target_bits=4)), [], []
    for step in range(400):
        gradient = math.exp(1.5 * math.sin(step / 3)) * gaussian(step, 200)
        bits.append(int(own.encode(gradient)[0][0]))
        sizes.append(math.log(float(gradient.square().sum())))
    assert np.mean(bits[:200]) == pytest.approx(4, rel=0.02)
    assert np.mean(bits) == pytest.approx(4, rel=0.02)
    assert np.corrcoef(bits[100:], sizes[100:])[0, 1] > 0.8


# What the budget's rule is told


@pytest.mark.parametrize("case", ["skewed", "opposite", "uneven weights"])
def test_sizes_are_those_of_what_was_rounded_and_all_workers_know_the_same(case):
    """Each worker's own vector, by its share, and the mean of what came of them."""
    vectors, weights = CASES[case]
    results = means(DQ(target_bits=8, bucket=64), vectors, weights)
    used = [w / sum(weights) for w in weights]
    own = sum(u**2 * size_of(x, len(vectors), 64, "linf") for u, x in zip(used, vectors, strict=True))
    mean = size_of(sum(u * x for u, x in zip(used, vectors, strict=True)), len(vectors), 64, "linf")
    told = [coded.state()["sizes"] for _, coded in results]
    assert told == [told[0]] * len(vectors)
    assert told[0][0] == pytest.approx(own + mean, rel=0.05)
    assert mean < 0.6 * (own + mean)


def test_nobodys_vector_tells_nothing_of_sizes():
    for _, coded in means(DQ(), [gaussian(1, 50)] * 2, [0.0, 0.0]):
        assert coded.state()["sizes"] == {0: 0.0}
