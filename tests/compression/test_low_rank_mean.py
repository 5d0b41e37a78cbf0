"""PowerSGD's mean is the paper's, and the one of PyTorch's hook, for gradients of any size and of any rank, zero included."""

import sys
import warnings

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import leftovers
from compression.worlds import gaussian, means, run_workers
from paceline.compression import kernels
from paceline.compression.coded_mean import CodedMean
from paceline.compression.power import Power, factored

ROWS, COLUMNS = 40, 30
SIZE = ROWS * COLUMNS
RANGES, SHAPES = ((0, SIZE),), [(ROWS, COLUMNS)]
RANK_2 = Power(rank=2, warmup_steps=0)


def of_rank(rank, seed, dtype=torch.float32):
    left = gaussian(seed, ROWS * rank, dtype).view(ROWS, rank)
    return (left @ gaussian(seed + 500, COLUMNS * rank, dtype).view(rank, COLUMNS)).view(-1)


def averaged(vectors, codec=RANK_2, weights=None, steps=None):
    """The means, step by step, of lists of each worker's vectors; checked to be the same on all workers."""
    flows = [lambda step, own=own: own[step].clone() for own in vectors]
    flows_of_weights = None if weights is None else [lambda step, own=own: own[step] for own in weights]
    results = means(codec, flows, flows_of_weights, steps=len(vectors[0]), ranges=RANGES, shapes=SHAPES)
    for found, coded in results[1:]:
        for (x, _), (other, _) in zip(results[0][0], found, strict=True):
            torch.testing.assert_close(x, other, rtol=0, atol=0, equal_nan=True)
        for own, other in zip(coded.slots[0].rights, results[0][1].slots[0].rights, strict=True):
            assert torch.equal(own, other)
    return [x for x, _ in results[0][0]], [coded.slots[0] for _, coded in results]


# Beside other implementations


def textbook(vectors, weights, right):
    """Algorithms 1 and 2, with the documented difference: a worker's memory is what its own matrix lacks."""
    memories, sent = [np.zeros((ROWS, COLUMNS)) for _ in vectors], []
    for step in range(len(vectors[0])):
        given = [
            memory + vector[step].double().numpy().reshape(ROWS, COLUMNS)
            for memory, vector in zip(memories, vectors, strict=True)
        ]
        mean = np.average(given, axis=0, weights=[own[step] for own in weights])
        left, _ = np.linalg.qr(mean @ right)
        right = mean.T @ left
        for worker, own in enumerate(given):
            if weights[worker][step]:
                memories[worker] = own - left @ (left.T @ own)
        sent.append(left @ right.T)
    return sent, memories


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_means_and_memories_are_the_papers(dtype, rank):
    """Three workers; one has no batch in some steps, and half a batch in others."""
    steps, exact = 12, dtype == torch.float64
    vectors = [[gaussian(100 * worker + step, SIZE, dtype) for step in range(steps)] for worker in range(3)]
    weights = [[1.0] * steps, [2.0, 1.0] * (steps // 2), [1.0, 0.0, 0.5] * (steps // 3)]
    found, slots = averaged(vectors, Power(rank=rank, warmup_steps=0), weights)
    [matrix] = factored(Power(rank=rank), SHAPES, [0])
    sent, memories = textbook(vectors, weights, matrix.first_factor(rank).double().numpy().T)
    for x, expected in zip(found, sent, strict=True):
        np.testing.assert_allclose(x.view(ROWS, COLUMNS), expected, atol=1e-11 if exact else 1e-3)
    for slot, expected in zip(slots, memories, strict=True):
        np.testing.assert_allclose(slot.memory.view(ROWS, COLUMNS), expected, atol=1e-11 if exact else 1e-3)


class Bucket:
    """Of PyTorch's hook: one bucket with one parameter."""

    def __init__(self, x):
        self.x = x

    def buffer(self):
        return self.x

    def gradients(self):
        return [self.x.view(ROWS, COLUMNS)]

    def index(self):
        return 0

    def is_last(self):
        return True


@pytest.fixture
def alone_on_gloo():
    """A group whose thread has let go of it before it ends: as the last to do so it would wait for itself, and abort."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    group = distributed.group.WORLD
    references = sys.getrefcount(group)
    yield
    leftovers.wait_until(lambda: sys.getrefcount(group) <= references, "the end of the hook's callbacks")
    distributed.destroy_process_group()


def test_means_are_those_of_pytorchs_hook(alone_on_gloo):
    """The hook's mean depends on the workers' mean alone, so one worker that has it stands for all."""
    vectors = [[gaussian(100 * worker + step, SIZE, torch.float64) for step in range(10)] for worker in range(3)]
    found, _ = averaged(vectors)
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    [matrix] = factored(RANK_2, SHAPES, [0])
    state.iter = 2
    state.p_memory_dict[0] = torch.empty(2 * ROWS, dtype=torch.float64)
    state.q_memory_dict[0] = matrix.first_factor(2).double().T.reshape(-1)
    for step, x in enumerate(found):
        bucket = Bucket(sum(own[step] for own in vectors) / 3)
        powerSGD_hook(state, bucket).wait()
        torch.testing.assert_close(x, bucket.x, rtol=0, atol=1e-11)


# Scale


def scaled(vectors, factor):
    return [[factor * x for x in own] for own in vectors]


@pytest.mark.parametrize("exponent", [-100, -66, -20, 20, 66, 100])
def test_a_power_of_two_scales_all_bits(exponent):
    vectors = [[gaussian(100 * worker + step, SIZE) for step in range(8)] for worker in range(2)]
    found, slots = averaged(vectors)
    others, other_slots = averaged(scaled(vectors, 2.0**exponent))
    assert all(torch.equal(2.0**exponent * x, y) for x, y in zip(found, others, strict=True))
    assert all(
        torch.equal(2.0**exponent * own.memory, other.memory) for own, other in zip(slots, other_slots, strict=True)
    )


@pytest.mark.parametrize("factor", [1e-30, 1e-20, 1e-6, 1e6, 1e20, 1e30])
def test_any_factor_scales_the_means(factor):
    vectors = [[gaussian(100 * worker + step, SIZE) for step in range(4)] for worker in range(2)]
    found, _ = averaged(vectors)
    others, _ = averaged(scaled(vectors, factor))
    for x, y in zip(found, others, strict=True):
        np.testing.assert_allclose(y.double() / factor, x, atol=1e-4)


# Factors that would stay zero


def distance_of_trained(begins_at, scale, steps=90):
    """How far the late matrix ends from its target; the gradient of both workers' mean is the difference to it."""
    target = of_rank(2, 7)

    def program(worker, ports):
        coded, x = CodedMean(RANK_2, ports, ((0, SIZE), (SIZE, 2 * SIZE)), SHAPES * 2), torch.zeros(2 * SIZE)
        for step in range(steps):
            g = gaussian(1000 * worker + step, 2 * SIZE)
            g[:SIZE] = scale * (x[:SIZE] - target * (1.5 - worker)) if step >= begins_at else 0
            coded.start(0, g, 1.0).wait()
            x[:SIZE] -= 0.3 / scale * g[:SIZE]
        return (x[:SIZE] - target).norm() / target.norm()

    first, second = run_workers(2, program, 2 * SIZE)
    assert first == second
    return first


@pytest.mark.parametrize("begins_at", [0, 1, 60])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_late_matrix_trains_as_without_a_codec(begins_at, scale):
    assert distance_of_trained(begins_at, scale) < 1e-4


def test_the_first_gradient_of_an_unused_matrix_is_exact_where_it_is_of_the_rank():
    """Its right factor has waited: a left factor that is drawn instead would have a small part of it."""
    x = of_rank(2, 1)
    found, _ = averaged([[torch.zeros(SIZE), torch.zeros(SIZE), x]] * 2)
    assert not any(one.any() for one in found[:2])
    assert torch.allclose(found[2], x, atol=1e-4)


def test_a_matrix_that_turns_to_other_columns_is_followed():
    """Its right factor is zero where the new gradients are, so the product with them is zero."""
    before, after = of_rank(2, 1).view(ROWS, COLUMNS).clone(), of_rank(2, 2).view(ROWS, COLUMNS).clone()
    before[:, 15:] = 0
    after[:, :15] = 0
    found, slots = averaged([[before.view(-1)] * 2 + [after.view(-1)] * 4] * 2)
    assert torch.allclose(found[1], before.view(-1), atol=1e-4)
    assert all(found[step].any() for step in (2, 3))
    assert torch.allclose(sum(found[2:]), 4 * after.view(-1), atol=1e-3)
    assert all(slot.memory.abs().max() < 1e-3 for slot in slots)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_matrix_of_lower_rank_is_exact_and_more_is_found_when_it_comes(rank):
    codec = Power(rank=4, warmup_steps=0)
    less, more = of_rank(rank, 3), of_rank(4, 9)
    found, slots = averaged([[less] * 3 + [more] * 6] * 2, codec)
    assert all(torch.allclose(x, less, atol=1e-4) for x in found[:3])
    assert torch.allclose(found[-1], more, atol=1e-3)
    assert torch.allclose(sum(found[3:]), 6 * more, atol=1e-3)
    assert all(bool(right.any(1).all()) for slot in slots for right in slot.rights)


def test_a_worker_whose_matrix_is_zero_takes_part():
    vectors = [[of_rank(2, 3)] * 3, [torch.zeros(SIZE)] * 3, [of_rank(2, 3)] * 3]
    found, slots = averaged(vectors)
    assert all(torch.allclose(x, 2 / 3 * of_rank(2, 3), atol=1e-4) for x in found)
    assert not slots[1].memory.any()


def test_opposite_matrices_cancel_and_are_kept():
    x = gaussian(4, SIZE)
    found, slots = averaged([[x] * 3, [-x] * 3])
    assert not any(one.any() for one in found)
    assert torch.equal(slots[0].memory, -slots[1].memory)


def orthonormal(columns):
    drawn = np.random.default_rng(1)
    at = 0
    while (at := kernels.orthonormalize(columns, at)) < len(columns):
        columns[at] = drawn.random(columns.shape[1]) - 0.5
    return columns


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-35, 1e-12, 1.0, 1e12, 1e35])
@pytest.mark.parametrize(
    "kind", ["any", "zero", "equal", "zero among them", "nearly equal", "square", "unlike lengths"]
)
def test_columns_are_orthonormal(kind, scale, dtype):
    columns = np.random.default_rng(5).standard_normal((4, 4 if kind == "square" else 50))
    if kind == "zero":
        columns[:] = 0
    elif kind == "equal":
        columns[:] = columns[0]
    elif kind == "zero among them":
        columns[1] = 0
    elif kind == "nearly equal":
        columns[1:] = columns[0] + 1e-4 * columns[1:]
    elif kind == "unlike lengths":
        columns *= np.array([[1e-2], [1.0], [1e2], [1e-1]])
    found = orthonormal((scale * columns).astype(dtype)).astype(np.float64)
    np.testing.assert_allclose(found @ found.T, np.eye(4), atol=4 * np.finfo(dtype).eps)
    if kind in ("any", "nearly equal", "unlike lengths"):  # spans what it did
        unit = (columns / np.linalg.norm(columns, axis=1, keepdims=True)).astype(dtype).astype(np.float64)
        np.testing.assert_allclose(unit @ found.T @ found, unit, atol=1e-6)


# Memory and checkpoints


def test_what_was_sent_and_what_is_kept_is_what_came_whatever_is_drawn_again():
    """Zeros, one rank, all ranks, and a worker without a batch."""
    weights = [[1.0, 1.0, 3.0, 1.0, 2.0], [1.0, 1.0, 0.0, 1.0, 2.0]]
    matrices = [torch.zeros(SIZE), of_rank(1, 1), of_rank(3, 2), torch.zeros(SIZE), gaussian(3, SIZE)]
    vectors = [[m * (1 + worker) for m in matrices] for worker in range(2)]

    def program(worker, ports):
        coded, sent, came = CodedMean(RANK_2, ports, RANGES, SHAPES), 0.0, 0.0
        for step, x in enumerate(vectors[worker]):
            x, total = x.clone(), sum(own[step] for own in weights)
            came = came + x.double() * weights[worker][step] / total
            coded.start(0, x, weights[worker][step], total=total).wait()
            sent = sent + x.double()
        slot = coded.slots[0]
        return sent, came - slot.share * slot.memory.double()

    (sent, first), (other, second) = run_workers(2, program, SIZE)
    assert torch.equal(sent, other)
    assert torch.allclose(sent, first + second, atol=1e-4)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_run_goes_on_bit_for_bit_after_columns_were_drawn_again(at):
    steps = [torch.zeros(SIZE), of_rank(1, 3), torch.zeros(SIZE), of_rank(1, 4), gaussian(5, SIZE), gaussian(6, SIZE)]

    def run(first, last, states=None):
        def program(worker, ports):
            coded, found = CodedMean(RANK_2, ports, RANGES, SHAPES), []
            if states is not None:
                coded.load(states[worker])
            for x in steps[first:last]:
                found.append(x * (1 + worker))
                coded.start(0, found[-1], 1.0).wait()
            return found, coded.state()

        return run_workers(2, program, SIZE)

    whole = run(0, 6)
    rest = run(at, 6, [state for _, state in run(0, at)])
    for (straight, _), (resumed, _) in zip(whole, rest, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(straight[at:], resumed, strict=True))


def test_a_checkpoint_with_right_factors_of_zeros_goes_on():
    x = of_rank(2, 3)

    def program(worker, ports):
        coded, sent = CodedMean(RANK_2, ports, RANGES, SHAPES), torch.zeros(SIZE)
        kept = {"count": 3, "memory": torch.zeros(SIZE), "share": 0.0, "rights": [torch.zeros(2, COLUMNS)]}
        coded.load({"codec": coded.fingerprint, "worker": worker, "slots": {0: kept}, "sizes": {}, "tuner": {}})
        for _ in range(4):
            y = x.clone()
            coded.start(0, y, 1.0).wait()
            sent += y
        return sent

    for sent in run_workers(2, program, SIZE):
        assert torch.allclose(sent, 4 * x, atol=1e-3)


@pytest.mark.parametrize("weight", [1.0, 1e3])
def test_sums_that_overflow_are_nan_and_change_no_memory(weight):
    vectors = [gaussian(1, SIZE), gaussian(2, SIZE).clamp(-1, 1) * 3e38, gaussian(3, SIZE)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, slots = averaged([vectors] * 2, weights=[[weight] * 3] * 2)
    assert found[1].isnan().all()
    assert found[2].isfinite().all()
    expected, _ = averaged([vectors[:1]] * 2, weights=[[weight]] * 2)
    assert torch.equal(found[0], expected[0])
    assert all(bool(slot.memory.isfinite().all()) for slot in slots)


def test_a_memory_that_overflows_with_a_gradient_is_as_it_was():
    def program(worker, ports):
        coded = CodedMean(RANK_2, ports, RANGES, SHAPES)
        coded.start(0, gaussian(worker, SIZE), 1.0).wait()
        memory = coded.slots[0].memory
        if worker:
            memory[7] = 3e38
        before, x = memory.clone(), gaussian(9, SIZE)
        if worker:
            x[7] = 3e38
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            coded.start(0, x, 1.0).wait()
        return x, torch.equal(memory, before)

    (first, first_is_same), (second, second_is_same) = run_workers(2, program, SIZE)
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert (first_is_same, second_is_same) == (False, True)
